"""What a program must know of a model: how many blocks, and which parameters belong together. Plain data, no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelShape:
    """Buckets are numbered: bucket i < num_blocks is what only block i uses, bucket num_blocks + k the parameters
    that exactly the blocks shared[k] use together (a tied embedding and head)."""

    num_blocks: int
    shared: tuple[tuple[int, ...], ...]
    held: tuple[bool, ...]  # per bucket: has parameters at all
    trained: tuple[bool, ...]  # per bucket: has parameters that are trained

    @property
    def num_buckets(self) -> int:
        return self.num_blocks + len(self.shared)

    def buckets(self, block: int) -> tuple[int, ...]:
        """The buckets with parameters that a block uses."""
        shared = (self.num_blocks + k for k, blocks in enumerate(self.shared) if block in blocks)
        return tuple(bucket for bucket in (block, *shared) if self.held[bucket])

    def users(self, bucket: int) -> tuple[int, ...]:
        """The blocks that use a bucket."""
        return (bucket,) if bucket < self.num_blocks else self.shared[bucket - self.num_blocks]
