"""From a captured model and a plan to what programs are made for: sliced, split, and its parameters in buckets.

Everyone who runs, verifies or predicts a plan on a graph composes it here, so that what is predicted is what runs. A
bucket is reduced in one message, so its parameters are used by the same blocks and, where tensors are split, summed
over the same ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from phalanx.engine.graph import ExecutionGraph
from phalanx.model.captured import Captured
from phalanx.model.graph.blocks import Block, Blocks
from phalanx.model.shard.shard import shard
from phalanx.model.shard.sharded import Sharded
from phalanx.model.slicing import Sliced, slice_model
from phalanx.plan.plan import Plan
from phalanx.program.shape import BlockOp, ModelShape, Partition

Key = tuple[tuple[int, ...], Partition]  # the blocks that use a bucket, and over whom it is summed


@dataclass(frozen=True)
class Composed:
    """captured: with blocks that run on slices, where the plan has them. sharded: as one tensor-parallel rank has it,
    where the plan splits tensors."""

    captured: Captured
    sliced: Sliced | None
    sharded: Sharded | None
    buckets: BucketNames

    @property
    def shape(self) -> ModelShape:
        return self.buckets.shape

    @property
    def graph(self) -> ExecutionGraph:
        return ExecutionGraph.of(self.captured.blocks, self.sharded)

    def integers(self) -> dict[str, torch.dtype]:
        """The dtypes of parameters that are tables of integers."""
        return {name: getattr(torch, dtype) for name, dtype in self.captured.integers.items()}

    def local_shapes(self) -> dict[str, tuple[int, ...]]:
        """Of every parameter, as far as it would lie on the rank."""
        split = self.sharded.parameters if self.sharded else {}
        shapes = self.captured.shapes
        return {name: split[name].local.local_shape if name in split else shape for name, shape in shapes.items()}


def compose(captured: Captured, plan: Plan, tp_index: int, dtype: torch.dtype, trainable: Collection[str]) -> Composed:
    """As the rank with this place in a tensor-parallel group has it."""
    sliced = slice_model(captured, dtype) if plan.slices else None
    captured = sliced.captured if sliced is not None else captured
    sharded = shard(captured, plan, tp_index, dtype) if plan.tp > 1 else None
    return Composed(captured, sliced, sharded, bucket_names(captured.blocks, trainable, sharded, sliced))


@dataclass(frozen=True)
class BucketNames:
    """The names of the parameters of each bucket."""

    shape: ModelShape
    names: tuple[tuple[str, ...], ...]  # per bucket, in order of first use


def bucket_names(
    blocks: Blocks, trainable: Collection[str], sharded: Sharded | None = None, sliced: Sliced | None = None
) -> BucketNames:
    """A parameter that one block uses is in that block's bucket; those that the same several blocks use share one, and
    so do those that a block must sum over the same ranks of its tensor-parallel group."""
    users: dict[str, tuple[int, ...]] = {}
    for index, name in _uses(blocks, sharded):
        if index not in users.get(name, ()):
            users[name] = (*users.get(name, ()), index)
    lost = set(blocks.parameters()) - set(users)
    assert not lost, f"no segment uses {sorted(lost)}, which the model's blocks use"
    keys = {name: (used_by, _sums(name, sharded)) for name, used_by in users.items()}
    own: list[Key] = [((index,), ()) for index in range(len(blocks.blocks))]
    further = sorted(set(keys.values()) - set(own))
    names = tuple(tuple(name for name, key in keys.items() if key == bucket) for bucket in (*own, *further))
    learns = set(trainable)
    shape = ModelShape(
        len(blocks.blocks), tuple(used_by for used_by, _ in further),
        held=tuple(bool(group) for group in names),
        trained=tuple(any(name in learns for name in group) for group in names),
        ops=_ops(blocks, sharded, {name: number for number, own in enumerate(names) for name in own}),
        sums=tuple(sums for _, sums in (*own, *further)) if sharded else (),
        granularities=sliced.granularities if sliced else (),
        per_micro_batch=sliced.per_micro_batch if sliced else frozenset(),
    )  # fmt: skip
    return BucketNames(shape, names)


def _ops(blocks: Blocks, sharded: Sharded | None, home: Mapping[str, int]) -> tuple[tuple[BlockOp, ...], ...]:
    """The chain of ops of each block; where tensors are not split, one segment. home: the bucket of each
    parameter."""
    if sharded is None:
        ops = [(BlockOp("segment", block.names("activation"), block.outputs, degree=1),) for block in blocks.blocks]
        segments = [[block] for block in blocks.blocks]
    else:
        ops = sharded.ops
        segments = [
            [None if part.segment is None else sharded.blocks.blocks[part.segment] for part in parts]
            for parts in sharded.parts
        ]
    return tuple(
        tuple(_with_buckets(op, segment, home) for op, segment in zip(*chain, strict=True))
        for chain in zip(ops, segments, strict=True)
    )


def _with_buckets(op: BlockOp, segment: Block | None, home: Mapping[str, int]) -> BlockOp:
    if segment is None:
        return op
    buckets = tuple(sorted({home[name] for name in segment.names("parameter")}))
    return replace(op, buckets=buckets, pasts=len(segment.names("past")))


def _uses(blocks: Blocks, sharded: Sharded | None) -> Iterator[tuple[int, str]]:
    """Every block with every parameter it uses."""
    if sharded is None:
        yield from ((index, name) for index, block in enumerate(blocks.blocks) for name in block.names("parameter"))
        return
    assert len(sharded.parts) == len(blocks.blocks), "every block has its parts"
    for index, parts in enumerate(sharded.parts):
        segments = [sharded.blocks.blocks[part.segment] for part in parts if part.segment is not None]
        yield from ((index, name) for segment in segments for name in segment.names("parameter"))


def _sums(name: str, sharded: Sharded | None) -> Partition:
    """Over whom the gradients of a parameter are summed; () where nobody's are."""
    if sharded is None:
        return ()
    parameter = sharded.parameters[name]
    cells = tuple(sorted(tuple(sorted(cell)) for cell in parameter.sums))
    if all(len(cell) == 1 for cell in cells):
        return ()
    same = [set(cell) for cell in parameter.holders]
    apart = [cell for cell in cells if len(cell) > 1 and not any(same_part.issuperset(cell) for same_part in same)]
    assert not apart, f"{name} is summed over {apart}, which keep different parts of it: {parameter.holders}"
    return cells
