"""Shapes of models whose blocks are split over ranks: the layer that everyone knows, and random ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hypothesis import strategies as st

from phalanx.plan.fields import POLICIES
from phalanx.plan.plan import SCHEDULES, Plan
from phalanx.plan.rules import OVERLAPS, PIPELINES_ONLY
from phalanx.program.shape import BlockOp, ModelShape, Partition
from tests.program.random_plans import plans, shapes, simple_shape

ELEMENTS = "batch * 100"


def segment(reads: str, writes: str, flops: str = "0") -> BlockOp:
    return BlockOp("segment", tuple(reads.split()), tuple(writes.split()), degree=2, flops=flops)


def redistribution(source: str, target: str, cells: Partition, forward: str = "", backward: str = "") -> BlockOp:
    return BlockOp("redistribution", (source,), (target,), 2, "", forward, backward, cells, ELEMENTS)


def layer(n: int, tp: int = 2, *, sequence: bool = False) -> tuple[BlockOp, ...]:
    """Norm, attention, add and norm, feed-forward, add: reads h{n}, writes h{n+1}."""
    cells = (tuple(range(tp)),)
    before = f"h{n}" if n else ""  # the first block reads nothing but the model's inputs
    enter = {"forward": "all_gather", "backward": "reduce_scatter"} if sequence else {"backward": "all_reduce"}
    leave = {"forward": "reduce_scatter", "backward": "all_gather"} if sequence else {"forward": "all_reduce"}
    return (
        segment(before, f"n{n}"),
        redistribution(f"n{n}", f"e{n}", cells, **enter),
        segment(f"e{n}", f"p{n}", "batch * 50"),
        redistribution(f"p{n}", f"a{n}", cells, **leave),
        segment(f"{before} a{n}", f"r{n} m{n}"),
        redistribution(f"m{n}", f"f{n}", cells, **enter),
        segment(f"f{n}", f"q{n}", "batch * 50"),
        redistribution(f"q{n}", f"o{n}", cells, **leave),
        segment(f"r{n} o{n}", f"h{n + 1}"),
    )


def stack(num_layers: int, tp: int = 2, *, sequence: bool = False, sums: bool = False) -> ModelShape:
    """Layers only; with sums, every second bucket has gradients on all tp ranks."""
    steps = tuple(layer(n, tp, sequence=sequence) for n in range(num_layers))
    all_ranks = (tuple(range(tp)),)
    plain = simple_shape(num_layers)
    partitions = tuple(all_ranks if bucket % 2 else () for bucket in range(num_layers)) if sums else ()
    return ModelShape(num_layers, (), plain.held, plain.trained, steps, partitions)


@st.composite
def tensor_plans(draw: st.DrawFn, schedules: Sequence[str] = SCHEDULES) -> Plan:
    schedule = draw(st.sampled_from(schedules))
    v = {"interleaved": 2, "zb-v": 2, "block-major": draw(st.integers(1, 2))}.get(schedule, 1)
    pp = draw(st.integers(2 if schedule in PIPELINES_ONLY else 1, 4 // v))
    dp = draw(st.integers(1, 2))
    sequence = draw(st.booleans())
    overlap = draw(st.sampled_from(sorted(OVERLAPS)))
    may_save = sequence and OVERLAPS[overlap].recompute != "block"
    zero = draw(st.integers(0, 3)) if dp > 1 else 0
    may_pair = pp == 1 and schedule == "1f1b" and zero < 3
    return Plan(
        pp=pp,
        dp=dp,
        tp=draw(st.sampled_from([2, 3, 4])),
        mb=draw(st.integers(1, 5)),
        schedule=schedule,
        v=v,
        stages=tuple(draw(st.lists(st.integers(1, 3), min_size=pp * v, max_size=pp * v))),
        zero=zero,
        overlap=overlap,
        pairs=may_pair and draw(st.booleans()),
        sequence=sequence,
        save=draw(st.sampled_from(["", "input", "result"])) if may_save else "",
    )


@st.composite
def cells_of(draw: st.DrawFn, tp: int) -> Partition:
    size = draw(st.sampled_from([d for d in range(1, tp + 1) if tp % d == 0]))
    return tuple(tuple(range(begin, begin + size)) for begin in range(0, tp, size))


@st.composite
def random_block(draw: st.DrawFn, n: int, tp: int) -> tuple[BlockOp, ...]:
    """Any chain of segments and redistributions that reads h{n} and writes h{n+1}, read by any later step besides."""
    kinds = [("", ""), ("all_reduce", ""), ("", "all_reduce"), ("all_gather", "reduce_scatter"),
             ("reduce_scatter", "all_gather"), ("all_gather", "")]  # fmt: skip
    length = draw(st.integers(1, 7))
    ends = draw(st.booleans())  # with a segment, or with a redistribution that hands on
    steps: list[BlockOp] = []
    activations = [f"h{n}"] if n else []
    for i in range(length):
        target = f"h{n + 1}" if i == length - 1 else f"w{n}.{i}"
        is_segment = i == 0 or (ends and i == length - 1) or draw(st.booleans())
        if is_segment:
            others = draw(st.sets(st.sampled_from(activations), max_size=2)) if activations else set[str]()
            steps.append(segment(" ".join(sorted({*others, *activations[-1:]})), target, str(draw(st.integers(0, 3)))))
        else:
            forward, backward = draw(st.sampled_from(kinds))
            steps.append(
                redistribution(draw(st.sampled_from(activations)), target, draw(cells_of(tp)), forward, backward)
            )
        activations.append(target)
    return tuple(steps)


@st.composite
def with_policies(draw: st.DrawFn, plan: Plan, shape: ModelShape) -> tuple[Plan, ModelShape]:
    """Layers are any blocks, and what is computed again is said for all, or for each layer."""
    layers = tuple(sorted(draw(st.sets(st.integers(0, shape.num_blocks - 1), min_size=1))))
    shape = replace(shape, layers=layers)
    if OVERLAPS[plan.overlap].recompute:
        return plan, shape
    words = st.sampled_from(POLICIES)
    one, several = st.lists(words, max_size=1), st.lists(words, min_size=len(layers), max_size=len(layers))
    recompute = tuple(draw(one | several))
    return replace(plan, recompute=recompute, save="" if recompute == ("block",) else plan.save), shape


@st.composite
def chained_cases(draw: st.DrawFn, schedules: Sequence[str] = SCHEDULES) -> tuple[Plan, ModelShape]:
    """Blocks that are not split: chains of one segment or several, with any policies."""
    plan = draw(plans(schedules))
    plan = replace(plan, mb=min(plan.mb, 4))
    plain = draw(shapes(sum(plan.stages)))
    blocks = [draw(unsplit_block(n)) for n in range(plain.num_blocks)]
    return draw(with_policies(plan, replace(plain, ops=tuple(blocks))))


@st.composite
def unsplit_block(draw: st.DrawFn, n: int) -> tuple[BlockOp, ...]:
    """Units one after the other, each of which may read what any before it has written."""
    length, activations = draw(st.integers(1, 3)), [f"h{n}"] if n else []
    steps: list[BlockOp] = []
    for i in range(length):
        others = draw(st.sets(st.sampled_from(activations), max_size=2)) if activations else set[str]()
        activations.append(f"h{n + 1}" if i == length - 1 else f"w{n}.{i}")
        steps.append(replace(segment(" ".join(sorted({*others, *activations[-2:-1]})), activations[-1]), degree=1))
    return tuple(steps)


@st.composite
def tensor_cases(draw: st.DrawFn, schedules: Sequence[str] = SCHEDULES) -> tuple[Plan, ModelShape]:
    plan = draw(tensor_plans(schedules))
    count = sum(plan.stages)
    steps = [draw(random_block(n, plan.tp) | st.just(layer(n, plan.tp))) for n in range(count)]
    if steps[-1][-1].kind != "segment":  # the loss is computed, not handed on
        steps[-1] = layer(count - 1, plan.tp)
    shared = draw(st.lists(st.sets(st.integers(0, count - 1), min_size=1, max_size=2), max_size=2))
    everything = (True,) * (count + len(shared))
    sums = tuple(draw(cells_of(plan.tp) | st.just(())) for _ in everything)
    ties = tuple(tuple(sorted(blocks)) for blocks in shared)
    return draw(with_policies(plan, ModelShape(count, ties, everything, everything, tuple(steps), sums)))
