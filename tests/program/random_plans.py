"""Random plans on random models, for properties of all programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hypothesis import strategies as st

from phalanx.plan.plan import SCHEDULES, Plan
from phalanx.plan.rules import PIPELINES_ONLY, VIRTUAL_STAGES
from phalanx.program.bind import bind
from phalanx.program.compile import CompiledPlan
from phalanx.program.instructions import from_text
from phalanx.program.shape import Backward, BlockOp, ModelShape

MAX_STAGES, MAX_MICRO_BATCHES, MAX_VIRTUAL, MAX_DP = 8, 16, 4, 4


@st.composite
def plans(draw: st.DrawFn, schedules: Sequence[str] = SCHEDULES) -> Plan:
    schedule = draw(st.sampled_from(schedules))
    virtual = {"interleaved": st.integers(2, MAX_VIRTUAL), "block-major": st.integers(1, MAX_VIRTUAL)}
    v = draw(virtual.get(schedule, st.just(VIRTUAL_STAGES[schedule])))
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


def chain(num_blocks: int, size: str, saved: str = "0", inputs: str = "0", **backward: str) -> ModelShape:
    """Blocks of one segment that writes `size` bytes and leaves `saved` for its backward."""
    steps: list[tuple[BlockOp, ...]] = []
    for n in range(num_blocks):
        reads, writes = (f"h{n}",) if n else (), (f"h{n + 1}",)
        own = Backward(writes, reads, reads, reads, writes, saved_bw=saved, **backward)  # pyright: ignore
        steps.append((BlockOp("segment", reads, writes, degree=1, sizes=(size,), traced=own),))
    return replace(simple_shape(num_blocks), ops=tuple(steps), inputs=inputs)


def by_hand(plan: Plan, shape: ModelShape, *texts: str) -> CompiledPlan:
    """Programs that were written by hand and are not checked, by place in the pipeline."""
    programs = tuple(from_text(text) for text in texts)
    tables = tuple(bind(plan, shape, program, index) for index, program in enumerate(programs))
    return CompiledPlan(plan, shape, programs, tables)
