"""Schedules: every piece of work once, in an order that can run, with the memory their names promise."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.plan import plan
from phalanx.plan.plan import Plan
from phalanx.program.expand import expand
from phalanx.program.instructions import Instruction, Op, Program, to_text
from phalanx.program.schedules import SCHEDULES

counts = st.integers(1, 30)
names = st.sampled_from(sorted(SCHEDULES))


def kept(program: Program) -> list[int]:
    """How many micro-batches' activations are held after each instruction."""
    alive, history = 0, []
    for instruction in program:
        alive += (instruction.op is Op.F) - (instruction.op in (Op.B, Op.BW))
        history.append(alive)
    return history


@given(names, counts)
def test_every_micro_batch_is_done_once_and_in_order(name: str, num_micro_batches: int) -> None:
    program = SCHEDULES[name](num_micro_batches)
    place = {instruction: i for i, instruction in enumerate(program)}
    assert len(place) == len(program), "an instruction twice"
    assert {instruction.micro_batch for instruction in program} == set(range(num_micro_batches))
    for i in range(num_micro_batches):
        ops = sorted((op for op in Op if Instruction(op, 0, i) in place), key=lambda op: place[Instruction(op, 0, i)])
        assert ops in ([Op.F, Op.BW], [Op.F, Op.B, Op.W])


@given(counts)
def test_gpipe_holds_all_micro_batches_and_the_others_one(num_micro_batches: int) -> None:
    assert max(kept(SCHEDULES["gpipe"](num_micro_batches))) == num_micro_batches
    assert max(kept(SCHEDULES["1f1b"](num_micro_batches))) == 1
    assert max(kept(SCHEDULES["zb-h1"](num_micro_batches))) == 1


@given(names, counts)
def test_a_plan_expands_to_its_schedule_and_one_step_at_the_end(name: str, num_micro_batches: int) -> None:
    program = expand(Plan(mb=num_micro_batches, schedule=name))
    assert program[:-1] == SCHEDULES[name](num_micro_batches)
    assert [i for i in program if i.op is Op.STEP] == [program[-1]]


@pytest.mark.parametrize("name, text", [
    ("gpipe", "F0.0 F0.1 BW0.1 BW0.0"), ("1f1b", "F0.0 BW0.0 F0.1 BW0.1"), ("zb-h1", "F0.0 B0.0 W0.0 F0.1 B0.1 W0.1"),
])  # fmt: skip
def test_stored_programs_replay_identically(name: str, text: str) -> None:
    assert to_text(SCHEDULES[name](2)) == text


def test_plans_know_exactly_the_schedules_there_are() -> None:
    assert sorted(plan.SCHEDULES) == sorted(SCHEDULES)
