"""The schedules benchmark: a profile of simulated steps predicts them."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.plan.complete import complete
from phalanx.plan.plan import Plan
from phalanx.predict.costs import BucketCosts, Costs, Link
from phalanx.predict.simulate import simulate
from phalanx.predict.timeline import Timeline
from phalanx.program.compile import compile_plan
from phalanx.program.instructions import RECEIVES, SENDS
from phalanx.program.shape import BlockOp, ModelShape

ROOT = Path(__file__).parent.parent.parent
BLOCKS = 8
STEPS = [BlockOp("segment", (f"h{n}",) if n else (), (f"h{n + 1}",), 1, sizes=("50*batch",)) for n in range(BLOCKS)]
SHAPE = ModelShape(BLOCKS, (), (True,) * BLOCKS, (True,) * BLOCKS, tuple((step,) for step in STEPS))
DIMS = {"batch": 1}
ELEMENTS = (3, 1, 4, 1, 5, 9, 2, 6)


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


def plan_of(schedule: str, more: str = "") -> Plan:
    return complete(f"pp=2,mb=4,schedule={schedule}{more}", world=2, batch_size=4, costs=(1.0,) * BLOCKS).plan


def simulated(plan: Plan, costs: Costs) -> Timeline:
    return simulate(compile_plan(plan, SHAPE), costs)


seconds = st.integers(1, 9).map(float)
per_block = st.tuples(*[seconds] * BLOCKS)


@given(per_block, per_block, per_block, st.integers(0, 3).map(float))
def test_a_profile_of_two_schedules_predicts_all_of_them(
    forward: tuple[float, ...], backward: tuple[float, ...], weight: tuple[float, ...], latency: float
) -> None:
    from schedule_profile import FUSED, SPLIT, costs, profile

    buckets = tuple(BucketCosts(step_seconds=0.1 * count) for count in ELEMENTS)
    true = Costs(forward, backward, weight, buckets, Link(latency, 100.0), Link(1.0), dims=DIMS)
    steps = {name: [as_measured(simulated(plan_of(name), true))] for name in (FUSED, SPLIT)}
    known = profile(steps, plan_of(FUSED), SHAPE, ELEMENTS)
    assert known.update == pytest.approx(0.1) and known.norm == pytest.approx(2.0) and known.issue == 0
    for plan in (plan_of("gpipe"), plan_of("1f1b"), plan_of("interleaved", ",v=2"), plan_of("zb-h1"), plan_of("zb-v")):
        predicted = simulated(plan, costs(known, plan, ELEMENTS, DIMS, Link(latency, 100.0)))
        expected = simulated(plan, true)
        assert predicted.makespan == pytest.approx(expected.makespan)
        assert predicted.mean_bubble == pytest.approx(expected.mean_bubble)


def as_measured(timeline: Timeline) -> Timeline:
    """The timeline as a run would measure it: a message is shown where it is issued."""
    messages = SENDS | RECEIVES
    return Timeline(tuple(e._replace(end=e.start) if e.instruction.op in messages else e for e in timeline.events))
