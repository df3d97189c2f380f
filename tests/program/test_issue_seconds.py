"""Starting a message takes a rank's own time, without being computation."""

from __future__ import annotations

from dataclasses import replace

from phalanx.plan.plan import Plan
from phalanx.program.costs import uniform
from phalanx.program.instructions import RECEIVES, SENDS
from phalanx.program.lower import lower
from phalanx.program.shape import ModelShape
from phalanx.program.simulate import simulate
from phalanx.program.timeline import Timeline

SHAPE = ModelShape(2, (), (True,) * 2, (True,) * 2)
PLAN = Plan(pp=2, mb=4, stages=(1, 1))


def simulated(issue_seconds: float) -> Timeline:
    costs = replace(uniform(SHAPE, send=0.25), issue_seconds=issue_seconds)
    return simulate(PLAN, SHAPE, lower(PLAN, SHAPE), costs)


def start(timeline: Timeline, rank: int, instruction: str) -> float:
    return next(e.start for e in timeline.events if e.rank == rank and str(e.instruction) == instruction)


def test_a_computation_begins_when_the_messages_before_it_are_started() -> None:
    timeline = simulated(0.5)
    assert start(timeline, 0, "SF0.0>1") == 1.5
    assert start(timeline, 0, "F0.1/0") == 2.0  # the send, and a receive posted ahead
    assert start(timeline, 1, "F1.0/1") == 1.75  # the message itself takes as long as before


def test_the_time_is_neither_computation_nor_an_event() -> None:
    before, after = simulated(0.0), simulated(0.5)
    assert [event.instruction for event in after.events] == [event.instruction for event in before.events]
    assert [after.busy(rank) for rank in (0, 1)] == [before.busy(rank) for rank in (0, 1)]
    assert after.makespan > before.makespan and after.mean_bubble > before.mean_bubble


def test_the_critical_path_still_goes_from_begin_to_end_through_messages() -> None:
    path = simulated(0.5).critical_path()
    assert path[0].start == 0 and path[0].cause is None
    assert any(event.instruction.op in SENDS | RECEIVES for event in path)
