"""What a program must know of a model: how many blocks, and which parameters belong together. Plain data, no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

GRANULARITIES = ("slice", "micro-batch")
COLLECTIVE = ("all_reduce", "all_gather", "reduce_scatter")  # what ranks do together; anything else each does alone
Partition = tuple[tuple[int, ...], ...]  # of the tp indices 0 … tp - 1 into cells; () where every index is alone
Names = tuple[str, ...]
_NAMED = ("takes", "gives", "reads", "w_reads", "w_takes")


@dataclass(frozen=True)
class Backward:
    """What a segment's backward needs and gives, as its joint graph says. Activations are named, everything else is a
    number of bytes: an expression over the dims of a micro-batch.

    takes: written activations whose gradients it takes. gives: read activations whose gradients it gives.
    reads, w_reads: activations that B, and W, compute from. w_takes: written activations whose gradients W needs too.
    inputs, w_inputs: whether B, and W, need the micro-batch's inputs.
    saved_b, saved_bw: bytes of its own that the forward leaves for B alone, and for W too. saved_w: what B leaves for
    W. trains: whether it gives gradients of parameters; d_parameters: their bytes as they come. same: (activation,
    activation): the first shares the memory of the second, which the segment reads or writes too. d_same: the same of
    gradients that it gives; the second may be one that it takes."""

    takes: Names
    gives: Names
    reads: Names
    w_reads: Names
    w_takes: Names
    inputs: bool = False
    w_inputs: bool = False
    saved_b: str = ""
    saved_bw: str = "1"
    saved_w: str = ""
    trains: bool = True
    d_parameters: str = "0"
    same: tuple[tuple[str, str], ...] = ()
    d_same: tuple[tuple[str, str], ...] = ()

    @cached_property
    def saved(self) -> tuple[tuple[str, str], ...]:
        """What the forward leaves, by the kind of value, with its bytes."""
        kinds = (("saved_b", self.saved_b), ("saved_bw", self.saved_bw))
        return tuple((kind, size) for kind, size in kinds if size)

    def or_else(self, other: Backward) -> Backward:
        """One that does for this and for another shape of micro-batch. These may differ: where a dim has length one,
        less has to be copied, and what is kept is the original instead of its copy."""
        names = {f: tuple(dict.fromkeys((*getattr(self, f), *getattr(other, f)))) for f in _NAMED}
        sizes = {f: getattr(self, f) or getattr(other, f) for f in ("saved_b", "saved_bw", "saved_w")}
        flags = {f: getattr(self, f) or getattr(other, f) for f in ("inputs", "w_inputs", "trains")}
        return replace(self, **names, **sizes, **flags)

    @cached_property
    def all_reads(self) -> Names:
        """Of B and W together."""
        return tuple(dict.fromkeys((*self.reads, *self.w_reads)))


@dataclass(frozen=True)
class BlockOp:
    """A part of a block that is run by itself: a segment, or a redistribution that re-places an activation between
    segments.

    forward, backward: what a redistribution does in that direction: a collective (all_reduce, all_gather,
    reduce_scatter), something local (shard: this rank's part; scale), or nothing where it is empty: the value is the
    same. cells: the tp indices that take part in it. Expressions are over the dims of a micro-batch.
    buckets: whose parameters a segment uses. pasts: its attentions that keep keys and values for later slices.
    sizes: bytes of what it writes, in order. traced: its backward, where that is known. working: bytes that F, B, W and
    BW need beside all values while they run, where they are known.
    """

    kind: str  # segment or redistribution
    reads: Names  # activations
    writes: Names
    degree: int
    unit: str = ""
    forward: str = ""
    backward: str = ""
    cells: Partition = ()
    elements: str = "0"  # of the whole tensor that is reduced, gathered or scattered: expression over those dims
    flops: str = "0"  # of a segment's forward on one rank: expression over those dims
    buckets: tuple[int, ...] | None = None  # None: all of its block's
    pasts: int = 0
    past_bytes: str = "0"
    sizes: Names = ()
    traced: Backward | None = None
    working: Names = ()

    @cached_property
    def bw(self) -> Backward:
        """Where nothing was traced, everything is differentiable, B and W read what the forward read."""
        return self.traced or Backward(self.writes, self.reads, self.reads, self.reads, self.writes)

    def size(self, name: str) -> str:
        return self._size_of.get(name, "0")

    @cached_property
    def _size_of(self) -> dict[str, str]:
        return dict(zip(self.writes, self.sizes))


@dataclass(frozen=True)
class ModelShape:
    """Buckets are numbered: bucket i < num_blocks is what only block i uses, bucket num_blocks + k the parameters
    that exactly the blocks shared[k] use together (a tied embedding and head), or that need a sum of their own.

    granularities: whether a block runs once per slice of a micro-batch's tokens, or once per micro-batch (an encoder),
    with slice 0; the latter come first. per_micro_batch: activations that belong to the micro-batch and not to one of
    its slices. layers: the blocks that are layers of the model, for which a plan may give something one by one.
    elements: of each bucket's trained parameters, as the first tensor-parallel rank has them; () where they are not
    known."""

    num_blocks: int
    shared: tuple[tuple[int, ...], ...]
    held: tuple[bool, ...]  # per bucket: has parameters at all
    trained: tuple[bool, ...]  # per bucket: has parameters that are trained
    ops: tuple[tuple[BlockOp, ...], ...] = ()  # per block; () where every block is one segment
    sums: tuple[Partition, ...] = ()  # per bucket: the tp indices whose gradients are summed; () where none are
    granularities: tuple[str, ...] = ()  # per block: slice or micro-batch; () where every block runs per slice
    per_micro_batch: frozenset[str] = frozenset()
    inputs: str = "0"  # bytes of what a micro-batch's inputs are made into
    layers: tuple[int, ...] = ()
    elements: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        assert all(granularity in GRANULARITIES for granularity in self.granularities) and len(self.granularities) in (
            0,
            self.num_blocks,
        )
        assert "slice" not in self.granularities[: self.num_whole_blocks], "micro-batch blocks come before slice blocks"

    def ops_of(self, block: int) -> tuple[BlockOp, ...]:
        """A block of which no more is known is one segment that takes from the block before and gives to the next."""
        if self.ops:
            return self.ops[block]
        return (BlockOp("segment", (f"h{block}",) if block else (), (f"h{block + 1}",), degree=1),)

    @cached_property
    def loss(self) -> str:
        """What the last op of the model writes."""
        return self.ops_of(self.num_blocks - 1)[-1].writes[0]

    @cached_property
    def sizes(self) -> dict[str, str]:
        """Bytes of every activation, where they are known: expressions over the dims of a micro-batch."""
        ops = (op for block in range(self.num_blocks) for op in self.ops_of(block))
        return {name: op.size(name) for op in ops for name in op.writes}

    @cached_property
    def _spans(self) -> dict[str, tuple[int, int]]:
        """The blocks that make each activation, and that read it last."""
        spans: dict[str, tuple[int, int]] = {}
        for block in range(self.num_blocks):
            for op in self.ops_of(block):
                spans |= {name: (spans[name][0], block) for name in op.reads if name in spans}
                spans |= {name: (block, block) for name in op.writes}
        return spans

    def crossing(self, cut: int) -> Names:
        """The activations alive between block `cut` - 1 and block `cut`, in the order in which they are made."""
        return tuple(name for name, (made, last) in self._spans.items() if made < cut <= last)

    def cells(self, bucket: int) -> Partition:
        return self.sums[bucket] if self.sums else ()

    @property
    def num_whole_blocks(self) -> int:
        """The blocks that run once per micro-batch: so many from the first."""
        return self.granularities.count("micro-batch")

    def blocks_with(self, slice: int | None, blocks: range) -> range:
        """Of consecutive blocks, those that run with a slice; all of them where micro-batches are whole."""
        return range(min(max(blocks.start, self.num_whole_blocks), blocks.stop), blocks.stop) if slice else blocks

    @property
    def num_buckets(self) -> int:
        return self.num_blocks + len(self.shared)

    def buckets(self, block: int) -> tuple[int, ...]:
        """The buckets with parameters that a block uses."""
        return self._buckets[block]

    @cached_property
    def _buckets(self) -> tuple[tuple[int, ...], ...]:
        found: list[tuple[int, ...]] = []
        for block in range(self.num_blocks):
            shared = (self.num_blocks + k for k, blocks in enumerate(self.shared) if block in blocks)
            found.append(tuple(bucket for bucket in (block, *shared) if self.held[bucket]))
        return tuple(found)

    def users(self, bucket: int) -> tuple[int, ...]:
        """The blocks that use a bucket."""
        return (bucket,) if bucket < self.num_blocks else self.shared[bucket - self.num_blocks]
