"""Programs as text: what is written reads back, and what is no instruction is shown."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.errors import PlanError
from phalanx.program.instructions import COMPUTE, RECEIVES, SENDS, Instruction, Op, from_text, to_text

number = st.integers(0, 99)
instructions = (
    st.builds(Instruction, st.sampled_from(sorted(COMPUTE)), number, number, st.none() | number)
    | st.builds(Instruction, st.sampled_from(sorted(SENDS | RECEIVES)), number, number, peer=number)
    | st.builds(Instruction, st.sampled_from([Op.GATHER, Op.FREE, Op.REDUCE]), number, number, number)
    | st.builds(Instruction, st.sampled_from([Op.TIE, Op.SHARE]), block=number)
    | st.builds(Instruction, st.sampled_from([Op.COUNT, Op.NORM, Op.STEP]))
)


@given(st.lists(instructions))
def test_any_program_reads_back_from_its_text(program: list[Instruction]) -> None:
    assert from_text(to_text(program)) == tuple(program)


def test_the_short_view_is_short() -> None:
    assert to_text([Instruction(Op.F, 0, 2), Instruction(Op.BW, 0, 2), Instruction(Op.STEP)]) == "F0.2 BW0.2 STEP"


def test_the_lowered_view_names_blocks_buckets_and_ranks() -> None:
    text = "COUNT RF1.0<0 G1.0/3 F1.0/3 X1.0/3 SF1.0>2 RB1.0<2 BW1.0/3 SB1.0>0 R1.0/3 T/14 NORM STEP P/3"
    assert to_text(from_text(text)) == text


def test_spaces_and_lines_between_instructions_do_not_matter() -> None:
    assert from_text(" F0.0\n  BW0.0 ") == from_text("F0.0 BW0.0")


@pytest.mark.parametrize(
    "word", ["Q0.1", "F0", "F.1", "SF0.1", "SF0.1<2", "RF0.1>2", "R0.1", "T0/1", "STEP0", "F0.1>2"]
)
def test_a_word_that_is_no_instruction_is_shown(word: str) -> None:
    with pytest.raises(PlanError, match="is not an instruction") as refused:
        from_text(f"F0.0 {word}")
    assert word in str(refused.value) and "F0.2" in str(refused.value)
