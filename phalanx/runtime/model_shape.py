"""From a captured model to the shape that programs are made for: which parameters belong to which bucket."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from phalanx.model.graph.blocks import Blocks
from phalanx.program.shape import ModelShape


@dataclass(frozen=True)
class BucketNames:
    """The names of the parameters of each bucket, and those that no block uses."""

    shape: ModelShape
    names: tuple[tuple[str, ...], ...]  # per bucket, in order of first use


def bucket_names(blocks: Blocks, trainable: Collection[str]) -> BucketNames:
    """A parameter that one block uses is in that block's bucket; those that the same several blocks use share one."""
    users: dict[str, tuple[int, ...]] = {}
    for index, block in enumerate(blocks.blocks):
        for name in block.names("parameter"):
            if index not in users.get(name, ()):
                users[name] = (*users.get(name, ()), index)
    shared = tuple(sorted({blocks_of for blocks_of in users.values() if len(blocks_of) > 1}))
    groups = [*((index,) for index in range(len(blocks.blocks))), *shared]
    names = tuple(tuple(name for name, used_by in users.items() if used_by == group) for group in groups)
    learns = set(trainable)
    shape = ModelShape(
        len(blocks.blocks), shared,
        held=tuple(bool(group) for group in names),
        trained=tuple(any(name in learns for name in group) for group in names),
    )  # fmt: skip
    return BucketNames(shape, names)
