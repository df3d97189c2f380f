"""From a captured model to the shape that programs are made for: which parameters belong to which bucket.

A bucket is reduced in one message, so its parameters are used by the same blocks and, where tensors are split, summed
over the same ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from phalanx.model.graph.blocks import Blocks
from phalanx.model.shard.sharded import Sharded
from phalanx.model.slicing import Sliced
from phalanx.program.shape import ModelShape, Partition

Key = tuple[tuple[int, ...], Partition]  # the blocks that use a bucket, and over whom it is summed


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
        steps=sharded.steps if sharded else (),
        sums=tuple(sums for _, sums in (*own, *further)) if sharded else (),
        grains=sliced.grains if sliced else (), whole_wires=sliced.whole_wires if sliced else frozenset(),
    )  # fmt: skip
    return BucketNames(shape, names)


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
