"""Random plans whose micro-batches are cut into slices, on models some of whose blocks run once per micro-batch."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from phalanx.plan.fields import Slicings
from phalanx.plan.plan import Plan
from phalanx.plan.rules import SLICED_SCHEDULES
from phalanx.program.shape import BlockOp, ModelShape
from tests.program.random_plans import cases, simple_shape
from tests.program.tensor_shapes import redistribution, segment, tensor_cases

Case = tuple[Plan, ModelShape]
MAX_MICRO_BATCHES = 3

lengths = st.lists(st.integers(1, 9), min_size=1, max_size=4).map(tuple)
slicings = st.lists(lengths, min_size=1, max_size=3).filter(lambda own: max(map(len, own)) > 1).map(tuple)


def grains(num_whole: int, num_blocks: int) -> tuple[str, ...]:
    return ("micro-batch",) * num_whole + ("slice",) * (num_blocks - num_whole)


@st.composite
def sliced(draw: st.DrawFn, whole: st.SearchStrategy[Case]) -> Case:
    """The same with slicings of any number of slices in turn."""
    plan, shape = draw(whole)
    slices: Slicings = draw(slicings)
    plan = replace(plan, slices=slices, pairs=False, mb=min(plan.mb, MAX_MICRO_BATCHES))
    num_whole = draw(st.integers(0, shape.num_blocks - 1) | st.just(0))
    per_micro_batch = frozenset(f"h{n}" for n in range(num_whole + 1)) if num_whole else frozenset[str]()
    return plan, replace(shape, granularities=grains(num_whole, shape.num_blocks), per_micro_batch=per_micro_batch)


def sliced_cases() -> st.SearchStrategy[Case]:
    """Any mesh, ZeRO stage and overlap mode."""
    return sliced(cases(SLICED_SCHEDULES) | tensor_cases(SLICED_SCHEDULES))


def encoder_decoder(num_encoder: int, num_decoder: int) -> ModelShape:
    """Encoder blocks that hand on h1, h2, …; the last one's result is read by every decoder block, as it is and through
    a redistribution that sends nothing."""
    cells = ((0, 1),)
    steps: list[tuple[BlockOp, ...]] = [
        (segment(f"h{n}" if n else "", f"p{n}"), redistribution(f"p{n}", f"h{n + 1}", cells, "all_reduce"))
        for n in range(num_encoder)
    ]
    memory = f"h{num_encoder}"
    for n in range(num_encoder, num_encoder + num_decoder):
        before = [] if n == num_encoder else [f"h{n}"]
        steps.append(
            (
                segment(" ".join([*before, memory]), f"q{n}"),
                redistribution(f"q{n}", f"s{n}", cells, "all_reduce", "all_gather"),
                redistribution(memory, f"m{n}", cells),
                segment(f"s{n} m{n}", f"h{n + 1}"),
            )
        )
    plain = simple_shape(num_encoder + num_decoder)
    return replace(
        plain,
        ops=tuple(steps),
        granularities=grains(num_encoder, plain.num_blocks),
        per_micro_batch=frozenset(f"h{n}" for n in range(num_encoder + 1)),
    )
