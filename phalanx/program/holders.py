"""Which rank of the pipeline holds which buckets, and which of them others hold too. Follows from where the plan puts
the blocks that use them."""

from __future__ import annotations

from phalanx.plan.plan import Plan
from phalanx.program.shape import ModelShape


def buckets_of(plan: Plan, shape: ModelShape, pp_index: int) -> tuple[int, ...]:
    """The buckets with parameters that a rank of the pipeline holds, in order."""
    blocks = [block for stage in plan.stages_of(pp_index) for block in plan.stage_blocks(stage)]
    return tuple(sorted({bucket for block in blocks for bucket in shape.buckets(block)}))


def holders(plan: Plan, shape: ModelShape, bucket: int) -> tuple[int, ...]:
    """The pp indices of the ranks that hold a bucket."""
    return tuple(pp_index for pp_index in range(plan.pp) if bucket in buckets_of(plan, shape, pp_index))


def is_tied(plan: Plan, shape: ModelShape, bucket: int) -> bool:
    """Whether several ranks of a pipeline add to a bucket's gradients, which must then be summed between them."""
    return bucket >= shape.num_blocks and shape.trained[bucket] and len(holders(plan, shape, bucket)) > 1


def summed_of(plan: Plan, shape: ModelShape, pp_index: int) -> tuple[int, ...]:
    """Of the buckets that are reduced, those of which several ranks then have the same shard: in other ZeRO groups, or
    in the same cell of tensor-parallel ranks."""
    others = plan.dp > plan.shards
    return tuple(
        bucket
        for bucket in reduced_of(plan, shape, pp_index)
        if plan.zero and (others or any(len(cell) > 1 for cell in shape.cells(bucket)))
    )


def reduced_of(plan: Plan, shape: ModelShape, pp_index: int) -> tuple[int, ...]:
    """The buckets whose gradients other ranks have a share of: replicas, or the cells of tensor-parallel ranks that
    computed with different samples or tokens."""
    return tuple(
        bucket
        for bucket in buckets_of(plan, shape, pp_index)
        if shape.trained[bucket] and (plan.dp > 1 or any(len(cell) > 1 for cell in shape.cells(bucket)))
    )
