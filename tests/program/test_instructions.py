"""Programs as text that reads back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.errors import PlanError
from phalanx.program.instructions import Instruction, Op, from_text, to_text

computing = st.sampled_from([op for op in Op if op is not Op.STEP])
instructions = st.builds(Instruction, computing, st.integers(0, 99), st.integers(0, 99)) | st.just(Instruction(Op.STEP))


@given(st.lists(instructions))
def test_any_program_reads_back_from_its_text(program: list[Instruction]) -> None:
    assert from_text(to_text(program)) == tuple(program)


def test_the_text_names_operation_stage_and_micro_batch() -> None:
    assert to_text([Instruction(Op.F, 1, 2), Instruction(Op.BW, 0, 10), Instruction(Op.STEP)]) == "F1.2 BW0.10 STEP"


def test_spaces_and_lines_between_instructions_do_not_matter() -> None:
    assert from_text("  F0.0\n\tB0.0 ") == (Instruction(Op.F), Instruction(Op.B))


@pytest.mark.parametrize("word", ["F0", "X0.1", "F0.1.2", "f0.0", "STEP0.0", "F-1.0", "F0.", "BWW0.0"])
def test_a_word_that_is_no_instruction_is_shown(word: str) -> None:
    with pytest.raises(PlanError, match="is not an instruction") as refused:
        from_text(f"F0.0 {word} STEP")
    assert f"'{word}'" in refused.value.message
    assert "stage.micro-batch" in refused.value.hint
