"""From the facts of a model to what the simulation needs: costs on an assumed device.

The durations are a roofline, not a measurement: good enough to compare schedules and to balance stages, and always
shown as an assumption.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import takewhile

from phalanx.expressions import evaluate
from phalanx.model.facts.facts import DTYPE_BYTES, Dims, ModelFacts, TensorFacts, load
from phalanx.plan.plan import Plan
from phalanx.predict.costs import TOKENS, BucketCosts, Costs, Link
from phalanx.predict.split_facts import Split, SplitFacts, splits_of
from phalanx.predict.update import ADAMW, TrainingBytes, Update
from phalanx.program.shape import Backward, BlockOp, ModelShape

FLOPS_PER_S = 1e14  # what one recent data-centre GPU reaches in bfloat16 training
LINK_BYTES_PER_S = 2.5e10  # a 200 Gbit/s network
HOST_BYTES_PER_S = 5e10  # of a recent data-centre GPU to the memory of its host, each way
_NETWORK = Link(latency_s=1e-5, bytes_per_s=LINK_BYTES_PER_S)
_HOST = Link(latency_s=1e-5, bytes_per_s=HOST_BYTES_PER_S)

SumBytes = Callable[[float], float]  # of a gradient that is so wide (`Plan.sum_bytes`)


@dataclass(frozen=True)
class Device:
    """What a rank is assumed to reach, and what connects it to the others and to the memory of its host."""

    flops_per_s: float = FLOPS_PER_S
    memory_bytes_per_s: float = 2e12
    link: Link = _NETWORK
    host_link: Link = _HOST
    host_memory_bytes_per_s: float = 1e11


def costs_of_facts(
    facts: SplitFacts, shape: ModelShape, dims: Dims, device: Device, sum_bytes: SumBytes = float,
    update: Update = ADAMW,
) -> Costs:  # fmt: skip
    """Costs of one micro-batch of `dims`, the largest, on the first tensor-parallel rank. The gradients of inputs and,
    as far as these are trained, those of weights take as long as the forward. shape: one of those of the facts.
    sum_bytes: as a plan has it."""
    forward, kept = block_seconds(shape, dims, device), TrainingBytes.of(facts.dtype, update)
    frozen = facts.frozen or (0,) * len(facts.elements)
    return Costs(
        forward=forward, backward=forward,
        weight=tuple(facts.learns(block) * own for block, own in enumerate(forward)),
        buckets=tuple(
            bucket_costs(size, DTYPE_BYTES[facts.dtype], kept, device, sum_bytes, still)
            for size, still in zip(facts.elements, frozen, strict=True)
        ),
        message_link=device.link, group_link=device.link, host_link=device.host_link, dims=dims,
        element_bytes=DTYPE_BYTES[facts.dtype],
    )  # fmt: skip


def block_seconds(shape: ModelShape, dims: Dims, device: Device) -> tuple[float, ...]:
    """The forward of each block: its arithmetic, or the writing of what it keeps, whichever takes longer; of one
    without either, such as an embedding, the writing of what it puts out: what takes no time is never at work."""
    known: dict[str, int] = {}
    whole = {**dims, "whole_tokens": dims[TOKENS]} if TOKENS in dims else dims

    def number(expression: str) -> int:
        if expression not in known:
            known[expression] = evaluate(expression or "0", whole)
        return known[expression]

    found: list[float] = []
    for block in range(shape.num_blocks):
        chain = [op for op in shape.ops_of(block) if op.kind == "segment"]
        kept = {name for op in chain for name in op.bw.reads}
        saved = sum(number(op.bw.saved_b) + number(op.bw.saved_bw) for op in chain)
        saved += sum(number(shape.sizes[name]) for name in kept)
        flops = sum(number(op.flops) for op in chain)
        leaving = sum(number(shape.sizes[name]) for name in shape.crossing(block + 1))
        found.append(max(flops / device.flops_per_s, (saved or leaving) / device.memory_bytes_per_s))
    return tuple(found)


def bucket_costs(
    size: int, width: int, kept: TrainingBytes, device: Device, sum_bytes: SumBytes = float,
    frozen: int = 0,
) -> BucketCosts:  # fmt: skip
    """size: parameters, each of `width` bytes, of which so many are frozen."""
    own = size - frozen
    sums = own * int(sum_bytes(kept.gradient))
    costs = BucketCosts(size * width, sums, own * kept.master, own * kept.moments, frozen_bytes=frozen * width)
    # Everything is read, and all but the gradients is written.
    state = costs.master_bytes + costs.moment_bytes
    moved = 2 * (costs.trained_bytes + state) + costs.gradient_bytes
    exact = 0 if kept.master else costs.trained_bytes  # without masters the host has the weights themselves
    on_host = 2 * (exact + state) + costs.gradient_bytes
    return replace(
        costs,
        step_seconds=moved / device.memory_bytes_per_s,
        host_step_seconds=on_host / device.host_memory_bytes_per_s,
    )


def shipped(facts: ModelFacts, plan: Plan) -> SplitFacts | None:
    """Of a model whose facts are shipped; None where nothing is about such a plan. Where facts of blocks are all there
    are, they stand for a model that is not split: eager, and without what segments need while they run."""
    if load(facts.name, facts.dtype) != facts:
        return None
    found, wanted = splits_of(facts.name, facts.dtype), Split.of(plan)
    # Where a unit can be split, allowing that it is not changes nothing.
    known = found.get(wanted) or found.get(replace(wanted, replicate=False))
    return known or (_of_blocks(facts, wanted) if plan.tp == 1 else None)


def _of_blocks(facts: ModelFacts, split: Split) -> SplitFacts:
    """All parameters count as trained: what is frozen is decided by a run, not by a model. Facts say what crosses from
    block to block; a block is taken to read all that crosses into it."""
    shared = tuple(sorted(set(_users(facts).values())))
    elements = tuple(_bucket_sizes(facts, shared))
    held = tuple(size > 0 for size in elements)
    granularities = _granularities(facts) if split.sliced else ()
    ops = tuple(_op(facts, number) for number in range(len(facts.blocks)))
    once = [op for op, granularity in zip(ops, granularities, strict=False) if granularity == "micro-batch"]
    shape = ModelShape(
        len(facts.blocks), shared, held, held, tuple((op,) for op in ops), granularities=granularities,
        per_micro_batch=frozenset(name for op in once for name in op.writes), inputs=_inputs(facts),
        layers=tuple(number for number, block in enumerate(facts.blocks) if any(unit.name for unit in block.units)),
    )  # fmt: skip
    return SplitFacts(split, facts.dtype, shape, shape, elements, tuple(block.parameters for block in facts.blocks))


def _op(facts: ModelFacts, number: int) -> BlockOp:
    """A block as one segment. What it keeps besides activations and inputs is its own, and W may need all of it."""
    block = facts.blocks[number]
    before = facts.blocks[number - 1].crossing if number else ()
    reads, names = tuple(t.name for t in before), {t.name for t in before}
    made = [t for t in block.crossing if t.name not in names]
    writes = tuple(t.name for t in made) or ("loss",)
    names = {*names, *writes}
    kept = tuple(tensor.name for tensor in block.shared if tensor.name in names)
    inputs = any(tensor.name not in names for tensor in block.shared)
    own = "-".join([f"({block.saved_bytes})", *(f"({tensor.bytes})" for tensor in block.shared)])
    backward = Backward(writes, reads, kept, kept, (), inputs, inputs, saved_bw=own, d_parameters="1")
    sizes = tuple(_bytes(t) for t in made) or ("4",)
    return BlockOp("segment", reads, writes, degree=1, flops=block.flops, sizes=sizes, traced=backward)


def _bytes(tensor: TensorFacts) -> str:
    return "*".join([*(f"({size})" for size in tensor.shape), str(DTYPE_BYTES[tensor.dtype])])


def _inputs(facts: ModelFacts) -> str:
    """What blocks keep of a micro-batch's inputs and what is made of them, such as masks and rotary tables."""
    names = {tensor.name for block in facts.blocks for tensor in block.crossing}
    kept = {tensor.name: tensor.bytes for block in facts.blocks for tensor in block.shared if tensor.name not in names}
    return "+".join(f"({size})" for size in kept.values()) or "0"


def _granularities(facts: ModelFacts) -> tuple[str, ...]:
    """An encoder's blocks are the first ones that have nothing to do with the tokens that slices cut."""
    if TOKENS not in facts.dims:
        return ()
    once = list(takewhile(lambda b: TOKENS not in b.flops and not any(map(_has_tokens, b.crossing)), facts.blocks))
    return ("micro-batch",) * len(once) + ("slice",) * (len(facts.blocks) - len(once))


def _has_tokens(tensor: TensorFacts) -> bool:
    return any(TOKENS in str(size) for size in tensor.shape)


def _users(facts: ModelFacts) -> dict[str, tuple[int, ...]]:
    """The blocks that use each tied parameter."""
    index = {block.name: i for i, block in enumerate(facts.blocks)}
    return {tied.name: tuple(sorted(index[name] for name in tied.blocks)) for tied in facts.tied}


def _bucket_sizes(facts: ModelFacts, shared: tuple[tuple[int, ...], ...]) -> list[int]:
    """Parameters of each bucket: what only one block uses, then what the same several blocks use."""
    users, sizes = _users(facts), [block.parameters for block in facts.blocks]
    together = dict.fromkeys(shared, 0)
    for tied in facts.tied:
        together[users[tied.name]] += tied.parameters
        for block in users[tied.name]:
            sizes[block] -= tied.parameters
    return [*sizes, *together.values()]
