"""What a program must know of a model: how many blocks, and which parameters belong together. Plain data, no torch."""

from __future__ import annotations

from dataclasses import dataclass

GRAINS = ("slice", "micro-batch")
Partition = tuple[tuple[int, ...], ...]  # of the tp indices 0 … tp - 1 into cells; () where every index is alone


@dataclass(frozen=True)
class Step:
    """A part of a block that is run by itself: a segment, or an exchange that re-places a wire between segments.

    forward, backward: the collective that an exchange needs in that direction (all_reduce, all_gather, reduce_scatter),
    empty for none. cells: the tp indices that take part in it. Expressions are over the dims of a micro-batch.
    """

    kind: str  # segment or exchange
    reads: tuple[str, ...]  # wires
    writes: tuple[str, ...]
    degree: int
    unit: str = ""
    forward: str = ""
    backward: str = ""
    cells: Partition = ()
    elements: str = "0"  # of the whole tensor that is reduced, gathered or scattered: expression over those dims
    flops: str = "0"  # of a segment's forward on one rank: expression over those dims


@dataclass(frozen=True)
class ModelShape:
    """Buckets are numbered: bucket i < num_blocks is what only block i uses, bucket num_blocks + k the parameters
    that exactly the blocks shared[k] use together (a tied embedding and head), or that need a sum of their own.

    grains: whether a block runs once per slice of a micro-batch's tokens, or once per micro-batch (an encoder), with
    slice 0; the latter come first. whole_wires: wires that belong to the micro-batch and not to one of its slices."""

    num_blocks: int
    shared: tuple[tuple[int, ...], ...]
    held: tuple[bool, ...]  # per bucket: has parameters at all
    trained: tuple[bool, ...]  # per bucket: has parameters that are trained
    steps: tuple[tuple[Step, ...], ...] = ()  # per block; () where every block is one segment
    sums: tuple[Partition, ...] = ()  # per bucket: the tp indices whose gradients are summed; () where none are
    grains: tuple[str, ...] = ()  # per block: slice or micro-batch; () where every block runs per slice
    whole_wires: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        assert all(grain in GRAINS for grain in self.grains) and len(self.grains) in (0, self.num_blocks)
        assert "slice" not in self.grains[: self.num_whole_blocks], "micro-batch blocks come before slice blocks"

    def steps_of(self, block: int) -> tuple[Step, ...]:
        return self.steps[block] if self.steps else ()

    def cells(self, bucket: int) -> Partition:
        return self.sums[bucket] if self.sums else ()

    @property
    def num_whole_blocks(self) -> int:
        """The blocks that run once per micro-batch: so many from the first."""
        return self.grains.count("micro-batch")

    def blocks_with(self, slice: int | None, blocks: range) -> range:
        """Of consecutive blocks, those that run with a slice; all of them where micro-batches are whole."""
        return range(min(max(blocks.start, self.num_whole_blocks), blocks.stop), blocks.stop) if slice else blocks

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
