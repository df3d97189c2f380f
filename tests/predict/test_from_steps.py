"""Costs from steps that ran: a simulated step, taken for a measured one, is predicted as it was."""

from __future__ import annotations

from dataclasses import replace

import pytest

from phalanx.plan.plan import Plan
from phalanx.predict.costs import BucketCosts, Costs, Link
from phalanx.predict.from_steps import Moment, Report, costs_of, report
from phalanx.predict.simulate import simulate
from phalanx.predict.timeline import COMPUTE, Timeline
from phalanx.program.compile import CompiledPlan, compile_plan
from phalanx.program.instructions import Instruction, Op
from tests.program.random_plans import simple_shape

ELEMENTS = 1000


def compiled_of(**options: object) -> CompiledPlan:
    plan = Plan(**options)  # pyright: ignore[reportArgumentType]
    plan = replace(plan, stages=(2,) * plan.num_stages)
    return compile_plan(plan, simple_shape(2 * plan.num_stages))


def costs(compiled: CompiledPlan, send: float) -> Costs:
    """Blocks that differ: the first is short, the last is long."""
    n = compiled.shape.num_blocks
    forward = (0.5, *(1.0,) * (n - 2), 3.0)
    bucket = BucketCosts(ELEMENTS, ELEMENTS, 0, step_seconds=0.25)
    return Costs(
        forward, forward, tuple(2 * f for f in forward), buckets=(bucket,) * n,
        message_link=Link(latency_s=send), group_link=Link(latency_s=send),
    )  # fmt: skip


def moments_of(timeline: Timeline, rank: int, start: float = 0.0) -> list[Moment]:
    """As a rank would have recorded it: communication ends, for it, when it is issued."""
    found, now = list[Moment](), start
    for event in (event for event in timeline.events if event.rank == rank):
        computes = event.resource == COMPUTE
        ready = start + event.start if computes else now
        end = start + event.end if computes or event.instruction.op is Op.NORM else now
        found.append(Moment(now, ready, end))
        now = end
    return found


def reports_of(compiled: CompiledPlan, timeline: Timeline) -> list[Report]:
    def alike(it: Instruction) -> object:
        return it.block, it.op_index, it.slice

    reports = []
    for rank in compiled.mesh.column(0):
        steps = [moments_of(timeline, rank, start) for start in (0.0, 1000.0)]
        found = report(compiled, rank, steps, alike, [ELEMENTS] * compiled.shape.num_buckets)
        reports.append(Report.from_json(found.to_json()))
    return reports


PLANS = (
    {"mb": 3}, {"pp": 2, "mb": 4}, {"pp": 3, "mb": 5, "schedule": "gpipe"}, {"pp": 2, "mb": 4, "schedule": "zb-h1"},
    {"pp": 2, "mb": 4, "schedule": "interleaved", "v": 2}, {"dp": 2, "mb": 2}, {"dp": 2, "mb": 2, "zero": 3},
    {"pp": 3, "mb": 4, "schedule": "gpipe", "offload": (("activations", 0), ("optimizer", 1.0))},
    {"mb": 2, "offload": (("optimizer-step", 1.0),)},
)  # fmt: skip


@pytest.mark.parametrize("options", PLANS, ids=str)
def test_a_step_is_predicted_from_its_own_times(options: dict[str, object]) -> None:
    compiled = compiled_of(**options)
    before = simulate(compiled, costs(compiled, send=0.0))
    after = simulate(compiled, costs_of(compiled, reports_of(compiled, before)))
    assert after.makespan == pytest.approx(before.makespan)


def test_a_message_takes_what_it_took_once_both_ends_had_issued_it() -> None:
    compiled = compiled_of(pp=2, mb=4)
    before = simulate(compiled, costs(compiled, send=0.125))
    found = costs_of(compiled, reports_of(compiled, before))
    assert found.measured is not None
    assert found.measured.moving[1]["RF1.0"] == pytest.approx(0.125)
    assert simulate(compiled, found).makespan == pytest.approx(before.makespan)


def test_times_of_a_slower_machine_predict_a_slower_step() -> None:
    compiled = compiled_of(pp=2, mb=4)
    before = simulate(compiled, costs(compiled, send=0.0))
    slower = Timeline(tuple(e._replace(start=3 * e.start, end=3 * e.end) for e in before.events))
    after = simulate(compiled, costs_of(compiled, reports_of(compiled, slower)))
    assert after.makespan == pytest.approx(3 * before.makespan)


def test_the_usual_time_of_instructions_that_are_alike_counts_and_neither_outliers_nor_waiting() -> None:
    compiled = compiled_of(mb=3)
    rows = compiled.tables[0].rows
    first = next(number for number, row in enumerate(rows) if row.instruction.op is Op.F)
    now, moments = 0.0, list[Moment]()
    for number, row in enumerate(rows):
        seconds = 100.0 if number == first else 1.0 if row.instruction.op is Op.F else 2.0
        moments.append(Moment(now, now + 0.5, now + 0.5 + seconds))
        now = moments[-1].end
    found = report(compiled, 0, [moments], lambda it: "all blocks", [ELEMENTS] * compiled.shape.num_buckets)
    assert {seconds for kind, seconds in found.own.items() if kind.startswith("F")} == {1.0}
    assert found.own["STEP"] == 2.0
