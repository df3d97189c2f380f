"""From the facts of a model to what programs and their simulation need: its shape, and costs on an assumed device.

The durations are a roofline, not a measurement: good enough to compare schedules and to balance stages, and always
shown as an assumption.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise, takewhile

from phalanx.expressions import evaluate
from phalanx.model.facts.facts import DTYPE_BYTES, Dims, ModelFacts, TensorFacts
from phalanx.plan.plan import Plan
from phalanx.program.costs import BucketCosts, Costs, Link
from phalanx.program.shape import ModelShape
from phalanx.program.slice_costs import TOKENS, slice_cost_of

FLOPS_PER_S = 1e14  # what one recent data-centre GPU reaches in bfloat16 training
LINK_BYTES_PER_S = 2.5e10  # a 200 Gbit/s network
_NETWORK = Link(latency_s=1e-5, bytes_per_s=LINK_BYTES_PER_S)


@dataclass(frozen=True)
class Device:
    """What a rank is assumed to reach, and what connects it to the others."""

    flops_per_s: float = FLOPS_PER_S
    memory_bytes_per_s: float = 2e12
    link: Link = _NETWORK


def shape_of_facts(facts: ModelFacts) -> ModelShape:
    """All parameters count as trained: what is frozen is decided by a run, not by a model."""
    shared = tuple(sorted(set(_users(facts).values())))
    held = tuple(size > 0 for size in _bucket_sizes(facts, shared))
    return ModelShape(len(facts.blocks), shared, held, held, grains=_grains(facts))


def costs_of_facts(facts: ModelFacts, plan: Plan, dims: Dims, device: Device) -> Costs:
    """Costs of one micro-batch of `dims` under a plan whose stages are decided.

    The gradients of inputs and those of weights take as long as the forward; recomputing adds one forward, which is an
    instruction of its own where the plan computes again in parts.
    """
    forward = block_seconds(facts, dims, device)
    saved = _saved_bytes(facts, plan, dims)
    cuts = tuple(sum(tensor.bytes(dims) for tensor in block.crossing) for block in facts.blocks)
    kept = (0, *cuts[:-1]) if plan.recompute or plan.again else saved
    return Costs(
        forward=forward,
        backward=tuple(2 * seconds for seconds in forward) if plan.recompute else forward,
        weight=forward,
        cut_bytes=cuts,
        whole_cut_bytes=tuple(
            sum(tensor.bytes(dims) for tensor in block.crossing if not _has_tokens(tensor)) for block in facts.blocks
        ),
        saved_bytes=kept,
        rebuilt_bytes=tuple(max(0, all_of_it - inputs) for all_of_it, inputs in zip(saved, kept)),
        buckets=tuple(
            bucket_costs(size, facts.dtype, device) for size in _bucket_sizes(facts, shape_of_facts(facts).shared)
        ),
        message_link=device.link,
        group_link=device.link,
        dims=dims,
        element_bytes=DTYPE_BYTES[facts.dtype],
        slice_cost=slice_cost_of(plan, [block.flops for block in facts.blocks], dims) if plan.slices else None,
    )


def block_seconds(facts: ModelFacts, dims: Dims, device: Device) -> tuple[float, ...]:
    """The forward of each block: its arithmetic or the writing of what it keeps, whichever takes longer."""
    return tuple(
        max(
            evaluate(block.flops, dims) / device.flops_per_s,
            evaluate(block.saved_bytes, dims) / device.memory_bytes_per_s,
        )
        for block in facts.blocks
    )


def _saved_bytes(facts: ModelFacts, plan: Plan, dims: Dims) -> tuple[int, ...]:
    """Per block, what it keeps beyond what the blocks before it on its stage keep already."""
    sizes: list[int] = []
    for stage in range(plan.num_stages):
        blocks = [facts.blocks[block] for block in plan.stage_blocks(stage)]
        sums = [facts.saved_bytes(dims, blocks[:count]) for count in range(len(blocks) + 1)]
        sizes += [after - before for before, after in pairwise(sums)]
    return tuple(sizes)


def _grains(facts: ModelFacts) -> tuple[str, ...]:
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


def bucket_costs(size: int, dtype: str, device: Device) -> BucketCosts:
    """AdamW: gradients and two moments in float32 or wider, and float32 masters of narrower weights."""
    width = DTYPE_BYTES[dtype]
    wide = max(4, width)
    masters = wide if width < wide else 0
    costs = BucketCosts(size * width, size * wide, size * (2 * wide + masters))
    # Everything is read, and all but the gradients is written.
    moved = 2 * (costs.weight_bytes + costs.optimizer_bytes) + costs.gradient_bytes
    return replace(costs, step_seconds=moved / device.memory_bytes_per_s)
