"""The closed forms of planning beside the simulation of the programs they stand for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from phalanx.plan.plan import Plan
from phalanx.planning.cost import Seconds, Software
from phalanx.planning.estimate import Place, fetch_seconds, step_parts
from phalanx.planning.slice_shares import equal, slowest
from phalanx.predict.costs import BucketCosts, Link, uniform
from phalanx.predict.simulate import simulate
from phalanx.program.compile import compile_plan
from phalanx.program.shape import ModelShape

BLOCKS = 12
SHAPE = ModelShape(BLOCKS, (), (True,) * BLOCKS, (True,) * BLOCKS)


@pytest.mark.parametrize("message", [0.0, 0.5])
@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("schedule, v", [("1f1b", 1), ("eager-1f1b", 1), ("zb-h1", 1), ("interleaved", 3)])
def test_a_step_of_equal_stages_takes_what_its_simulation_does(schedule: str, v: int, pp: int, message: float) -> None:
    for mb in (pp, 3 * pp):
        plan = Plan(pp=pp, mb=mb, schedule=schedule, v=v, stages=(BLOCKS // pp // v,) * (pp * v))
        simulated = simulate(compile_plan(plan, SHAPE), uniform(SHAPE, 1, 1, 1, send=message)).makespan
        place = Place(Seconds(BLOCKS / pp, BLOCKS / pp, BLOCKS / pp, 0, 0), 0, 0, 0, 0)
        parts = step_parts(plan, [place] * pp, message, Software(step=0.0, micro_batch=0.0))
        assert sum(parts.values()) == pytest.approx(simulated, rel=0.03)


@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("times", [(1.0, 1.0, 1.0), (1.0, 1.5, 1.0), (1.0, 1.0, 0.5)])
def test_a_step_of_zb_v_takes_about_what_its_simulation_does(pp: int, times: tuple[float, float, float]) -> None:
    """Whose order suits parts of equal length: others make every rank wait for the longest."""
    shape = ModelShape(2 * pp, (), (True,) * 2 * pp, (True,) * 2 * pp)
    plan = Plan(pp=pp, mb=4 * pp, schedule="zb-v", stages=(1,) * 2 * pp)
    simulated = simulate(compile_plan(plan, shape), uniform(shape, *times)).makespan
    place = Place(Seconds(*(2 * own for own in times), 0, 0), 0, 0, 0, 0)
    parts = step_parts(plan, [place] * pp, 0.0, Software(step=0.0, micro_batch=0.0))
    assert 0.97 <= sum(parts.values()) / simulated <= 1.15


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("count", [2, 8])
def test_a_step_of_equal_slices_takes_what_its_simulation_does(schedule: str, count: int) -> None:
    plan = Plan(pp=4, mb=2, slices=((1,) * count,), schedule=schedule, stages=(BLOCKS // 4,) * 4)
    costs = replace(uniform(SHAPE, 1, 1, 1), dims={"tokens": 64}, slice_cost=lambda *_: 1 / count)
    simulated = simulate(compile_plan(plan, SHAPE), costs).makespan
    place = Place(Seconds(BLOCKS / 4, BLOCKS / 4, BLOCKS / 4, 0, 0), 0, 0, 0, 0)
    parts = step_parts(plan, [place] * 4, 0.0, Software(step=0.0, micro_batch=0.0), slowest((1,) * count, 0.0))
    assert sum(parts.values()) == pytest.approx(simulated, rel=0.07)


@pytest.mark.parametrize("schedule", ["1f1b", "block-major"])
@pytest.mark.parametrize("come", [0.5, 2.0, 6.0])
def test_a_step_with_parameters_on_the_host_takes_about_what_its_simulation_does(schedule: str, come: float) -> None:
    """come: seconds in which the parameters of a block come from the host; its gradients leave in twice as many."""
    offload = (("parameters", 0), ("optimizer-step", 1.0))
    v = BLOCKS if schedule == "block-major" else 1
    plan = Plan(mb=4, schedule=schedule, v=v, stages=(BLOCKS // v,) * v, recompute=("block",), offload=offload)
    buckets = (BucketCosts(weight_bytes=100, gradient_bytes=200),) * SHAPE.num_buckets
    costs = replace(uniform(SHAPE, 1, 1, 1), buckets=buckets, host_link=Link(bytes_per_s=100 / come))
    simulated = simulate(compile_plan(plan, SHAPE), costs).makespan
    own = Seconds(BLOCKS, BLOCKS, BLOCKS, BLOCKS, 0)
    fetch = fetch_seconds(plan, own, BLOCKS * come, 2 * BLOCKS * come, 1 / BLOCKS)
    parts = step_parts(plan, [Place(own, 0, 0, 0, 0, fetch)], 0.0, Software(step=0.0, micro_batch=0.0))
    assert 0.9 <= sum(parts.values()) / simulated <= 1.15, (sum(parts.values()), simulated)


def test_slices_of_equal_cost_are_the_shorter_the_more_came_before_them() -> None:
    assert equal(4, 0.0, 64) == (1, 1, 1, 1)
    lengths = equal(4, 0.5, 64)
    assert sorted(lengths, reverse=True) == list(lengths) and lengths[0] > 1.5 * lengths[-1]
    assert 0.25 <= slowest(lengths, 0.5) < 0.27 < slowest((1, 1, 1, 1), 0.5)
