"""Which rank of the pipeline holds which buckets, and which of them others hold too. Follows from where the plan puts
the blocks that use them."""

from __future__ import annotations

from functools import lru_cache

from phalanx.plan.offload import ROUNDING, spread
from phalanx.plan.plan import CHUNK, Plan
from phalanx.program.shape import ModelShape


def buckets_of(plan: Plan, shape: ModelShape, pp_index: int) -> tuple[int, ...]:
    """The buckets with parameters that a rank of the pipeline holds, in order."""
    blocks = [block for stage in plan.stages_of(pp_index) for block in plan.stage_blocks(stage)]
    return tuple(sorted({bucket for block in blocks for bucket in shape.buckets(block)}))


def holders(plan: Plan, shape: ModelShape, bucket: int) -> tuple[int, ...]:
    """The pp indices of the ranks that hold a bucket."""
    return tuple(pp_index for pp_index in range(plan.pp) if bucket in buckets_of(plan, shape, pp_index))


def hosted_of(plan: Plan, shape: ModelShape, pp_index: int) -> tuple[int, ...]:
    """The buckets of a rank whose optimizer state lies on the host, in the order in which a forward needs them. Which,
    is the same for all ranks, so that those which keep the same update it alike. State is larger than the parameters it
    belongs to: where these lie on the host, so does it."""
    if not plan.hosted_share and not plan.hosts_parameters:
        return ()
    wanted = {*hosted_by_share(plan, shape), *fetched_of(plan, shape, pp_index)}
    held = (b for b in buckets_of(plan, shape, pp_index) if b in wanted and shape.trained[b])
    return tuple(sorted(held, key=lambda b: (shape.users(b)[0], b)))


def fetched_of(plan: Plan, shape: ModelShape, pp_index: int) -> tuple[int, ...]:
    """The buckets of a rank whose parameters lie on the host, and are fetched for each use: all, or those that no
    others use than so many layers of the rank, spread evenly over it."""
    count = dict(plan.offload).get("parameters")
    if count is None:
        return ()
    held, layers = buckets_of(plan, shape, pp_index), set(spread(layers_of(plan, shape, pp_index), int(count)))
    return tuple(b for b in held if not count or layers.issuperset(shape.users(b)))


def layers_of(plan: Plan, shape: ModelShape, pp_index: int) -> tuple[int, ...]:
    """The layers that a rank of the pipeline holds, or its blocks where a model has none."""
    blocks = (block for stage in plan.stages_of(pp_index) for block in plan.stage_blocks(stage))
    return tuple(block for block in blocks if not shape.layers or block in shape.layers)


def left_of(plan: Plan, shape: ModelShape, pp_index: int) -> tuple[int, ...]:
    """The buckets of a rank whose gradients leave for the host: where it updates, or where their parameters lie too."""
    hosted, fetched = hosted_of(plan, shape, pp_index), fetched_of(plan, shape, pp_index)
    return hosted if plan.steps_on_host else tuple(b for b in hosted if b in fetched)


@lru_cache(maxsize=64)
def hosted_by_share(plan: Plan, shape: ModelShape) -> tuple[int, ...]:
    """Whole buckets, evenly over the model, so that their share is as close as can be to what the plan wants. What the
    model begins with stays on the device unless all goes: the next forward would have to wait for its update."""
    if not plan.hosted_share:
        return ()
    stays = None if plan.hosted_share >= 1 - ROUNDING else _first_used(shape)
    found: list[int] = []
    hosted = seen = 0
    for bucket in range(shape.num_buckets):
        if shape.trained[bucket]:
            size = _elements(shape, bucket)
            seen += size
            if bucket != stays and hosted + size / 2 <= plan.hosted_share * seen:
                found.append(bucket)
                hosted += size
    return tuple(found)


def _first_used(shape: ModelShape) -> int | None:
    used = (bucket for block in range(shape.num_blocks) for bucket in sorted(shape.buckets(block)))
    return next((bucket for bucket in used if shape.trained[bucket]), None)


def chunks_of(plan: Plan, shape: ModelShape, bucket: int) -> int:
    """In how many parts a bucket's state comes to the device or is updated on the host: none larger than a usual
    bucket, nor than `CHUNK` elements."""
    sizes = sorted(_elements(shape, b) for b in range(shape.num_buckets) if shape.trained[b])
    largest = max(1, min(CHUNK, sizes[len(sizes) // 2] // plan.shards))
    return max(1, -(-(_elements(shape, bucket) // plan.shards) // largest))


def _elements(shape: ModelShape, bucket: int) -> int:
    return shape.elements[bucket] if shape.elements else 1


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
