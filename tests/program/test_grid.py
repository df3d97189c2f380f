"""The grid: ranks against time as text, with bands of a width, a marked place, and what can never run."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from phalanx.plan.plan import Plan
from phalanx.program.grid import Mark, draw, place, short_view
from phalanx.program.instructions import Instruction, Op, from_text
from phalanx.program.lower import lower, schedule_of
from phalanx.program.shape import ModelShape
from tests.program.random_plans import plans, simple_shape
from tests.program.tensor_shapes import tensor_cases


def test_instructions_stand_at_their_time_and_waiting_is_a_dot() -> None:
    programs = schedule_of(Plan.parse("pp=2,mb=2"))
    assert draw(programs, ["rank 0", "rank 1"]).splitlines() == [
        "rank 0  F0.0  F0.1  ·     ·     BW0.0       ·     BW0.1",
        "rank 1  ·     F1.0  BW1.0       F1.1  BW1.1",
    ]


def test_a_wide_grid_is_broken_into_bands() -> None:
    programs = schedule_of(Plan.parse("pp=2,mb=2,schedule=zb-h1"))
    bands = draw(programs, ["0", "1"], width=31).split("\n\n")
    assert [band.splitlines() for band in bands] == [
        ["0  F0.0 F0.1 ·    B0.0", "1  ·    F1.0 B1.0 F1.1"],
        ["0  W0.0 B0.1 W0.1", "1  B1.1 W1.0 W1.1"],
    ]
    assert all(len(line) <= 31 for band in bands for line in band.splitlines())


def test_a_mark_shows_only_its_band() -> None:
    programs = schedule_of(Plan.parse("pp=2,mb=8"))
    text = draw(programs, ["0", "1"], Mark(1, Instruction(Op.F, 1, 7)), width=60)
    lines = text.splitlines()
    assert len(lines) == 2 and "[F1.7]" in lines[1] and lines[1].endswith("<-- here") and "here" not in lines[0]
    assert "F0.0" not in text
    assert draw(programs, ["0", "1"], Mark(0), width=60).splitlines()[0].endswith("BW0.7 <-- here")


def test_what_never_runs_has_a_question_mark() -> None:
    programs = [from_text("F0.0 BW0.0"), from_text("F1.0 W1.0 B1.0")]
    rows = place(programs)
    assert [[cell.runs for cell in row] for row in rows] == [[True, False], [True, False, False]]
    assert "BW0.0?" in draw(programs, ["0", "1"]) and "W1.0?" in draw(programs, ["0", "1"])


def test_programs_without_computation_draw_empty_rows() -> None:
    assert draw([(), ()], ["0", "1"], Mark(0)) == "0 <-- here\n1"


@given(plans())
def test_the_short_view_is_found_again_in_the_lowered_one(plan: Plan) -> None:
    programs = lower(plan, simple_shape(sum(plan.stages)))
    assert tuple(short_view(program) for program in programs) == schedule_of(plan)


@given(tensor_cases())
def test_the_short_view_has_one_word_per_visit_whatever_it_was_lowered_to(case: tuple[Plan, ModelShape]) -> None:
    plan, shape = case
    for program, order in zip(lower(plan, shape), schedule_of(plan), strict=True):
        # A lone segment whose W follows its B at once looks the same under both kinds of schedule.
        fused = {it._replace(op=Op.BW) if it.op is Op.B else it for it in short_view(program) if it.op is not Op.W}
        assert fused == {it._replace(op=Op.BW) if it.op is Op.B else it for it in order if it.op is not Op.W}


@given(plans(), st.integers(20, 100))
def test_every_instruction_is_drawn(plan: Plan, width: int) -> None:
    programs = schedule_of(plan)
    words = draw(programs, [f"{row}:" for row in range(plan.pp)], width=width).split()
    drawn = sorted(word for word in words if word != "·" and not word.endswith(":"))
    assert drawn == sorted(str(instruction) for program in programs for instruction in program)


def test_slices_have_cells_of_their_own_and_a_stage_that_runs_once_has_one() -> None:
    programs = schedule_of(Plan.parse("pp=2,slices=2"))
    assert draw(programs, ["rank 0", "rank 1"]).splitlines() == [
        "rank 0  F0.0.0  F0.0.1  ·       ·       ·       BW0.0.1         BW0.0.0",
        "rank 1  ·       F1.0.0  F1.0.1  BW1.0.1         BW1.0.0",
    ]
    once = from_text("F0.0.0 BW0.0.0"), programs[1]
    assert [line.rstrip() for line in draw(once, ["rank 0", "rank 1"]).splitlines()] == [
        "rank 0  F0.0.0  ·       ·       ·       ·       ·       ·       BW0.0.0",
        "rank 1  ·       F1.0.0  F1.0.1  BW1.0.1         BW1.0.0",
    ]
