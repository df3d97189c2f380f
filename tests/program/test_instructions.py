"""Programs as text: what is written reads back, and what is no instruction is shown."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.errors import PlanError
from phalanx.program.instructions import (
    COMPUTE,
    LOCAL_REDISTRIBUTIONS,
    MOVES,
    RECEIVES,
    REDISTRIBUTIONS,
    SENDS,
    Instruction,
    Op,
    from_text,
    to_text,
)


def made(*place: object, **parts: object) -> Instruction:
    """What is not given stays out: of a named tuple hypothesis would make up all fields."""
    return Instruction(*place, **parts)  # pyright: ignore


number = st.integers(0, 99)
half = st.sampled_from([None, 0, 1])
slice = st.none() | number
computes, redistributions = (
    st.sampled_from(sorted(COMPUTE)),
    st.sampled_from(sorted(REDISTRIBUTIONS | LOCAL_REDISTRIBUTIONS)),
)
instructions = (
    st.builds(made, computes, number, number, st.none() | number, half=half, slice=slice)
    | st.builds(made, computes | redistributions, number, number, number, half=half, op_index=number, slice=slice)
    | st.builds(made, st.sampled_from(sorted(SENDS | RECEIVES)), number, number, peer=number, half=half, slice=slice)
    | st.builds(made, st.just(Op.GATHER), number, number, number, slice=slice)
    | st.builds(made, st.sampled_from(sorted(MOVES)), number, number, number, half=half, op_index=number, slice=slice)
    | st.builds(made, st.sampled_from(sorted(MOVES)), block=number, op_index=st.none() | number)
    | st.builds(made, st.just(Op.STEP), block=number, op_index=number)
    | st.builds(made, st.just(Op.INPUT), micro_batch=number, half=half)
    | st.builds(made, st.just(Op.REDUCE), number, number, number)
    | st.builds(made, st.sampled_from([Op.SUM, Op.TIE, Op.SHARE]), block=number)
    | st.builds(made, st.sampled_from([Op.COUNT, Op.NORM, Op.STEP]))
)


@given(st.lists(instructions))
def test_any_program_reads_back_from_its_text(program: list[Instruction]) -> None:
    assert from_text(to_text(program)) == tuple(program)


def test_the_short_view_is_short() -> None:
    assert to_text([Instruction(Op.F, 0, 2), Instruction(Op.BW, 0, 2), Instruction(Op.STEP)]) == "F0.2 BW0.2 STEP"


def test_the_lowered_view_names_blocks_buckets_and_ranks() -> None:
    text = "COUNT I.0 RF1.0<0 G1.0/3 F1.0/3 SF1.0>2 RB1.0<2 BW1.0/3 SB1.0>0 R1.0/3 S/3 T/14 NORM STEP P/3"
    assert to_text(from_text(text)) == text


def test_halves_and_steps_are_named_where_there_are_any() -> None:
    first = Instruction(Op.F, 1, 0, 5, half=0, op_index=2)
    assert to_text([first, Instruction(Op.CB, 1, 0, 5, half=1, op_index=3)]) == "F1.0a/5:2 CB1.0b/5:3"
    text = "I.0b RF1.0b<0 LF1.0b/5:1 A1.0b/5:2 CA1.0b/5:3 CF1.0/5:3 BW1.0/5:0 SF1.0b>2"
    assert to_text(from_text(text)) == text


def test_slices_are_named_behind_their_micro_batch() -> None:
    assert str(Instruction(Op.F, 1, 0, slice=2)) == "F1.0.2"
    assert str(Instruction(Op.F, 1, 0, 5, half=0, op_index=3, slice=2)) == "F1.0.2a/5:3"
    text = "RF1.0.2b<0 G1.0.2/5 F1.0.2/5 CF1.0.2/5:3 LB1.0.2/5:4 SF1.0.2>2 R1.0/5"
    assert to_text(from_text(text)) == text


def test_spaces_and_lines_between_instructions_do_not_matter() -> None:
    assert from_text(" F0.0\n  BW0.0 ") == from_text("F0.0 BW0.0")


@pytest.mark.parametrize(
    "word",
    ["Q0.1", "F0", "F.1", "SF0.1", "SF0.1<2", "RF0.1>2", "R0.1", "T0/1", "STEP0", "F0.1>2",
     "F0.1c/2", "F0.1:2", "CF0.1/2", "CF0.1:2", "G0.1a/2", "R0.1/2:0", "SF0.1/2>1",
     "R0.1.2/2", "F0.1a.2", "F0.1.2.3", "T.0.1/2", "X0.1/2", "I", "I0.1", "I.0.1", "I.0/1", "LF0.1/2"],
)  # fmt: skip
def test_a_word_that_is_no_instruction_is_shown(word: str) -> None:
    with pytest.raises(PlanError, match="is not an instruction") as refused:
        from_text(f"F0.0 {word}")
    assert word in str(refused.value) and "F0.2" in str(refused.value)
