"""From a captured model and a plan to what programs are made for: sliced, split, and its parameters in buckets.

Everyone who runs, verifies or predicts a plan on a graph composes it here, so that what is predicted is what runs. A
bucket is reduced in one message, so its parameters are used by the same blocks and, where tensors are split, summed
over the same ranks.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from phalanx.model.captured import Captured
from phalanx.model.graph.blocks import Block, Blocks
from phalanx.model.shard.shard import shard
from phalanx.model.shard.sharded import Chained, Part, Sharded
from phalanx.model.shard.unsplit import unsplit
from phalanx.model.slicing import Sliced, slice_model
from phalanx.plan.plan import Plan
from phalanx.program.instructions import Instruction
from phalanx.program.shape import BlockOp, ModelShape, Partition

# The blocks that use a bucket, over whom it is summed, and whether several segments of a block add to its gradients.
Key = tuple[tuple[int, ...], Partition, bool]


@dataclass(frozen=True)
class ExecutionGraph:
    """How the model's blocks are made of segments and redistributions on this rank: a block is always a chain of ops.

    model: the blocks that a plan speaks of. segments: what is run. parts: how the former are made of the latter.
    light: the blocks whose segments keep only products and attention."""

    model: Blocks
    segments: Blocks
    parts: tuple[tuple[Part, ...], ...]
    light: frozenset[int] = frozenset()

    @staticmethod
    def of(model: Blocks, chained: Chained, light: frozenset[int] = frozenset()) -> ExecutionGraph:
        return ExecutionGraph(model, chained.blocks, chained.parts, light)

    def part(self, instruction: Instruction) -> Part:
        assert instruction.block is not None
        return self.parts[instruction.block][instruction.op_index or 0]

    def segment(self, part: Part) -> Block:
        assert part.segment is not None, "a redistribution is not a segment"
        return self.segments.blocks[part.segment]


@dataclass(frozen=True)
class Composed:
    """captured: with blocks that run on slices, where the plan has them. chained: as one tensor-parallel rank has it.
    light: the blocks whose segments keep only products and attention."""

    captured: Captured
    sliced: Sliced | None
    chained: Chained
    buckets: BucketNames
    light: frozenset[int]

    @property
    def sharded(self) -> Sharded | None:
        """The chains, where the plan splits tensors."""
        return self.chained if isinstance(self.chained, Sharded) else None

    @property
    def shape(self) -> ModelShape:
        return self.buckets.shape

    @property
    def graph(self) -> ExecutionGraph:
        return ExecutionGraph.of(self.captured.blocks, self.chained, self.light)

    def integers(self) -> dict[str, torch.dtype]:
        """The dtypes of parameters that are tables of integers."""
        return {name: getattr(torch, dtype) for name, dtype in self.captured.integers.items()}

    def local_shapes(self) -> dict[str, tuple[int, ...]]:
        """Of every parameter, as far as it would lie on the rank."""
        split = self.sharded.parameters if self.sharded else {}
        shapes = self.captured.shapes
        return {name: split[name].local.local_shape if name in split else shape for name, shape in shapes.items()}


def compose(
    captured: Captured, plan: Plan, tp_index: int, dtype: torch.dtype, trainable: Collection[str],
    whole: Collection[str] = (),
) -> Composed:  # fmt: skip
    """As the rank with this place in a tensor-parallel group has it. whole: parameters that are not to be cut."""
    sliced = slice_model(captured, dtype) if plan.slices else None
    captured = sliced.captured if sliced is not None else captured
    blocks = captured.blocks
    policies = [plan.recompute_of(block, blocks.layers) for block in range(len(blocks.blocks))]
    by_unit, light = (_where(policies, policy) for policy in ("unit", "light"))
    if plan.sums_exactly:  # whatever is computed again: gradients of what several units read are added in one order
        by_unit = frozenset(range(len(policies)))
    chained = shard(captured, plan, tp_index, dtype, whole) if plan.tp > 1 else unsplit(blocks, by_unit)
    buckets = bucket_names(blocks, trainable, chained, sliced)
    return Composed(captured, sliced, chained, _measured(buckets, captured, chained, trainable), light)


def _measured(buckets: BucketNames, captured: Captured, chained: Chained, trainable: Collection[str]) -> BucketNames:
    """With the number of elements of each: as the first of the ranks that split tensors has them, for all alike."""
    split = chained.parameters if isinstance(chained, Sharded) else {}
    learns = set(trainable)

    def elements(name: str) -> int:
        return split[name].locals[0].numel if name in split else math.prod(captured.shapes[name])

    counts = tuple(sum(elements(name) for name in names if name in learns) for names in buckets.names)
    return replace(buckets, shape=replace(buckets.shape, elements=counts))


def _where(policies: Sequence[str], policy: str) -> frozenset[int]:
    return frozenset(block for block, own in enumerate(policies) if own == policy)


@dataclass(frozen=True)
class BucketNames:
    """The names of the parameters of each bucket."""

    shape: ModelShape
    names: tuple[tuple[str, ...], ...]  # per bucket, in order of first use


def bucket_names(
    blocks: Blocks, trainable: Collection[str], chained: Chained | None = None, sliced: Sliced | None = None
) -> BucketNames:
    """A parameter that one block uses is in that block's bucket; those that the same several blocks use share one, and
    so do those that a block must sum over the same ranks of its tensor-parallel group, or that several of its segments
    use. Without chains, of whole blocks."""
    chained = unsplit(blocks) if chained is None else chained
    sharded = chained if isinstance(chained, Sharded) else None
    users: dict[str, tuple[int, ...]] = {}
    often: set[str] = set()
    for index, name in _uses(chained):
        if index in users.get(name, ()):
            often.add(name)
        else:
            users[name] = (*users.get(name, ()), index)
    assert len(chained.parts) == len(blocks.blocks), "every block has its parts"
    lost = set(blocks.parameters()) - set(users)
    assert not lost, f"no segment uses {sorted(lost)}, which the model's blocks use"
    keys = {name: (used_by, _sums(name, sharded), name in often) for name, used_by in users.items()}
    own: list[Key] = [((index,), (), False) for index in range(len(blocks.blocks))]
    further = sorted(set(keys.values()) - set(own))
    names = tuple(tuple(name for name, key in keys.items() if key == bucket) for bucket in (*own, *further))
    learns = set(trainable)
    shape = ModelShape(
        len(blocks.blocks), tuple(used_by for used_by, _, _ in further),
        held=tuple(bool(group) for group in names),
        trained=tuple(any(name in learns for name in group) for group in names),
        ops=_ops(chained, {name: number for number, own in enumerate(names) for name in own}),
        sums=tuple(sums for _, sums, _ in (*own, *further)) if sharded else (),
        granularities=sliced.granularities if sliced else (),
        per_micro_batch=sliced.per_micro_batch if sliced else frozenset(),
        layers=blocks.layers,
    )  # fmt: skip
    return BucketNames(shape, names)


def _ops(chained: Chained, home: Mapping[str, int]) -> tuple[tuple[BlockOp, ...], ...]:
    """The chain of ops of each block. home: the bucket of each parameter."""
    segments = chained.blocks.blocks
    return tuple(
        tuple(
            op if part.segment is None else _with_buckets(op, segments[part.segment], home)
            for op, part in zip(*chain, strict=True)
        )
        for chain in zip(chained.ops, chained.parts, strict=True)
    )


def _with_buckets(op: BlockOp, segment: Block, home: Mapping[str, int]) -> BlockOp:
    buckets = tuple(sorted({home[name] for name in segment.names("parameter")}))
    return replace(op, buckets=buckets, pasts=len(segment.names("past")))


def _uses(chained: Chained) -> Iterator[tuple[int, str]]:
    """Every block with the parameters of each of its segments."""
    for index, parts in enumerate(chained.parts):
        segments = [chained.blocks.blocks[part.segment] for part in parts if part.segment is not None]
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
