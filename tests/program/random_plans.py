"""Random plans on random models, for properties of all programs."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from phalanx.plan.plan import SCHEDULES, Plan
from phalanx.plan.rules import PIPELINES_ONLY
from phalanx.program.shape import ModelShape

MAX_STAGES, MAX_MICRO_BATCHES, MAX_VIRTUAL, MAX_DP = 8, 16, 4, 4


@st.composite
def plans(draw: st.DrawFn, schedules: Sequence[str] = SCHEDULES) -> Plan:
    schedule = draw(st.sampled_from(schedules))
    v = {"interleaved": draw(st.integers(2, MAX_VIRTUAL)), "zb-v": 2}.get(schedule, 1)
    pp = draw(st.integers(2 if schedule in PIPELINES_ONLY else 1, MAX_STAGES // v))
    dp = draw(st.integers(1, MAX_DP))
    zero = draw(st.integers(0, 3)) if dp > 1 else 0
    moments = st.sampled_from(["", "micro-batch", "step"])
    return Plan(
        pp=pp,
        dp=dp,
        mb=draw(st.integers(1, MAX_MICRO_BATCHES)),
        schedule=schedule,
        v=v,
        stages=tuple(draw(st.lists(st.integers(1, 2), min_size=pp * v, max_size=pp * v))),
        zero=zero,
        zero_degree=draw(st.sampled_from([0, *(d for d in range(2, dp + 1) if dp % d == 0)])) if zero else 0,
        gather=draw(moments) if zero == 3 else "",
        reduce=draw(moments) if zero >= 2 else "",
    )


@st.composite
def shapes(draw: st.DrawFn, num_blocks: int) -> ModelShape:
    sets = st.sets(st.integers(0, num_blocks - 1), min_size=2, max_size=3)
    shared = draw(st.lists(sets, max_size=2)) if num_blocks >= 3 else []
    num_buckets = num_blocks + len(shared)
    held = tuple(draw(st.lists(st.booleans() | st.just(True), min_size=num_buckets, max_size=num_buckets)))
    trained = tuple(h and draw(st.booleans() | st.just(True)) for h in held)
    return ModelShape(num_blocks, tuple(tuple(sorted(blocks)) for blocks in shared), held, trained)


@st.composite
def cases(draw: st.DrawFn, schedules: Sequence[str] = SCHEDULES) -> tuple[Plan, ModelShape]:
    plan = draw(plans(schedules))
    return plan, draw(shapes(sum(plan.stages)))


def simple_shape(num_blocks: int, *shared: tuple[int, ...]) -> ModelShape:
    """All buckets with trained parameters."""
    everything = (True,) * (num_blocks + len(shared))
    return ModelShape(num_blocks, shared, everything, everything)
