"""Which rank keeps what of the model's state under a plan: a pure function of the plan, facts about the model and the
rank's number. No torch, nothing is communicated.

Everything that lies on a device follows from here: ranks make their buffers by it, and what they save, export or will
move is described by it, so every rank knows what all others keep.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import chain

from phalanx.params.flat import FlatLayout, Piece, Sharding
from phalanx.params.state_facts import ParameterFacts, StateFacts
from phalanx.plan.mesh import Mesh
from phalanx.plan.plan import Plan
from phalanx.program.holders import buckets_of
from phalanx.state.layout import Box, Layout, StateShard


def layout_of(plan: Plan, facts: StateFacts, rank: int) -> tuple[StateShard, ...]:
    """Everything a rank must go on from, by its names in a checkpoint.

    An optimizer keeps nothing for a parameter before its first update. For one that a block uses but no loss depends on
    (a detached one) that never comes, so of its slots a rank has fewer than stand here."""
    return StateLayout(plan, facts).state(rank)


KeptSlot = tuple[str, str, tuple[int, ...] | None]  # slot, dtype, shape; None: as large as its parameter
SlotsOf = Callable[[str], Sequence[KeptSlot]]
_Key = tuple[int, int, int, bool, bool]  # bucket, tp index, shard, whether what is sharded is owned, and what is not
_Described = tuple[tuple[StateShard, ...], tuple[StateShard, ...]]  # parameters, and what the optimizer keeps of them


@dataclass(frozen=True)
class BucketLayout:
    """How what ranks with the same tp index keep of a bucket lies in flat buffers, and what lies beside them."""

    trained: FlatLayout | None
    frozen: FlatLayout | None
    unsharded: tuple[Piece, ...]


@dataclass(frozen=True)
class Kept:
    """A piece of a parameter that a rank keeps. owned: of all that keep it, this rank is the one that counts."""

    facts: ParameterFacts
    piece: Piece
    owned: bool

    @cached_property
    def boxes(self) -> tuple[Box, ...]:
        return self.piece.boxes()

    def shard(self, key: str, dtype: str) -> StateShard:
        """A tensor as large as the parameter."""
        return StateShard(key, self.facts.shape, dtype, self.boxes, self.owned)

    def beside(self, key: str, dtype: str, shape: tuple[int, ...] = ()) -> StateShard:
        """A tensor of another shape, such as a counter, that every rank with a piece of the parameter keeps alike."""
        return StateShard(key, shape, dtype, _all_of(shape), self.owned and self._has_first)

    @cached_property
    def _has_first(self) -> bool:
        """Whether the first element of the logical tensor is in it, which exactly one owner can say."""
        return any(not any(box.offset) for box in self.boxes)


@cache
def _all_of(shape: tuple[int, ...]) -> tuple[Box, ...]:
    return (Box.whole(shape),)


class StateLayout:
    """What every rank keeps under a plan. Ranks that keep the same share what was worked out for one of them."""

    def __init__(self, plan: Plan, facts: StateFacts) -> None:
        assert facts.tp == plan.tp, f"the facts are of tp={facts.tp}, the plan has tp={plan.tp}"
        self.plan, self.facts, self._mesh = plan, facts, Mesh.of(plan)
        self._kept: dict[_Key, tuple[Kept, ...]] = {}
        self._buckets: dict[tuple[int, int], BucketLayout] = {}

    @cached_property
    def _held(self) -> tuple[tuple[int, ...], ...]:
        """The buckets at each place of the pipeline; the first stage's keeps what no block uses."""
        unused = (self.facts.num_buckets,) if self.facts.num_buckets in self.facts.buckets else ()
        return tuple(
            buckets_of(self.plan, self.facts.shape, pp_index) + (unused if self.plan.pp_index(0) == pp_index else ())
            for pp_index in range(self.plan.pp)
        )

    @cached_property
    def _owner(self) -> dict[int, int]:
        """Of the places of the pipeline that hold a bucket, the one that counts: the first."""
        return {bucket: pp_index for pp_index in reversed(range(self.plan.pp)) for bucket in self._held[pp_index]}

    def sharding(self, rank: int) -> Sharding:
        """How a rank's buckets are divided."""
        group = self._mesh.zero_group(rank)
        return Sharding(len(group), group.index(rank), whole=self.plan.zero < 3)

    def buckets(self, rank: int) -> dict[int, BucketLayout]:
        """The buckets that a rank keeps."""
        pp_index, _, tp_index = self._mesh.coordinates(rank)
        return {bucket: self._bucket(bucket, tp_index) for bucket in self._held[pp_index]}

    def kept(self, rank: int) -> Iterator[Kept]:
        """The pieces that a rank keeps; those of which it has no element are left out."""
        return (kept for key in self._keys(rank) for kept in self._kept_as(key))

    def owned(self, rank: int) -> frozenset[str]:
        """The parameters whose pieces on a rank are the ones that count."""
        return frozenset(kept.facts.name for kept in self.kept(rank) if kept.owned)

    def parameters(self, rank: int) -> tuple[StateShard, ...]:
        """The parameters alone, by their own names, in the precision of training."""
        return tuple(kept.shard(kept.facts.name, kept.facts.integer or self.facts.dtype) for kept in self.kept(rank))

    def state(self, rank: int, slots: SlotsOf | None = None) -> tuple[StateShard, ...]:
        """Everything to go on from, by its names in a checkpoint. slots: what the optimizer keeps by now of each
        parameter (default: all that it will)."""
        return self._state(rank, slots or self.expected_slots, {})

    def expected_slots(self, name: str) -> tuple[KeptSlot, ...]:
        """What the optimizer keeps of a parameter once it was updated."""
        assert self.facts.slots is not None, "the optimizer's state is not laid out as its parameters are"
        return tuple((slot.name, slot.dtype, () if slot.is_counter else None) for slot in self.facts.slots)

    def updated(self, rank: int) -> Iterator[Kept]:
        """The pieces that the optimizer has state for."""
        return filter(self._is_updated, self.kept(rank))

    def _is_updated(self, kept: Kept) -> bool:
        """What no block uses never gets a gradient."""
        return kept.facts.trained and kept.facts.bucket < self.facts.num_buckets

    def exact(self, kept: Kept) -> StateShard:
        """A parameter in the highest precision there is."""
        if kept.facts.trained and self.facts.masters:
            return kept.shard(f"master/{kept.facts.name}", "float32")
        return kept.shard(f"model/{kept.facts.name}", kept.facts.integer or self.facts.dtype)

    def all_parameters(self) -> Layout:
        return {rank: self.parameters(rank) for rank in self._mesh.world}

    def all_state(self, slots: SlotsOf | None = None) -> Layout:
        known: dict[_Key, _Described] = {}
        return {rank: self._state(rank, slots or self.expected_slots, known) for rank in self._mesh.world}

    def _state(self, rank: int, slots: SlotsOf, known: dict[_Key, _Described]) -> tuple[StateShard, ...]:
        """known: what was described already, to which this adds."""
        keys = tuple(self._keys(rank))
        for key in keys:
            if key not in known:
                known[key] = self._described(self._kept_as(key), slots)
        exact, kept = zip(*(known[key] for key in keys), strict=True) if keys else ((), ())
        return tuple(chain(*exact, *kept))

    def _described(self, pieces: Sequence[Kept], slots: SlotsOf) -> _Described:
        found = list[StateShard]()
        for kept in filter(self._is_updated, pieces):
            for slot, dtype, shape in slots(kept.facts.name):
                key = f"optimizer/{slot}/{kept.facts.name}"
                found.append(kept.shard(key, dtype) if shape is None else kept.beside(key, dtype, shape))
        return tuple(map(self.exact, pieces)), tuple(found)

    def _keys(self, rank: int) -> Iterator[_Key]:
        """Of each bucket that a rank keeps, what its part of it depends on."""
        pp_index, _, tp_index = self._mesh.coordinates(rank)
        shard = self.sharding(rank).index
        first, only = rank == self._mesh.replica_group(rank)[0], rank == self._mesh.dp_group(rank)[0]
        for bucket in self._held[pp_index]:
            here = self._owner[bucket] == pp_index
            yield bucket, tp_index, shard, here and first, here and only

    def _kept_as(self, key: _Key) -> tuple[Kept, ...]:
        if key not in self._kept:
            self._kept[key] = tuple(self._pieces(*key))
        return self._kept[key]

    def _bucket(self, bucket: int, tp_index: int) -> BucketLayout:
        key = (bucket, tp_index)
        if key not in self._buckets:
            parameters = self.facts.buckets[bucket]
            trained = {each.name: each.local(tp_index) for each in parameters if each.trained}
            frozen = {each.name: each.local(tp_index) for each in parameters if each.sharded and not each.trained}
            self._buckets[key] = BucketLayout(
                FlatLayout.of(trained, self.plan.shards) if trained else None,
                FlatLayout.of(frozen, self.plan.shards) if frozen else None,
                tuple(Piece.whole(each.name, each.local(tp_index)) for each in parameters if not each.sharded),
            )
        return self._buckets[key]

    def _pieces(self, bucket: int, tp_index: int, shard: int, owns_sharded: bool, owns_rest: bool) -> Iterator[Kept]:
        layout = self._bucket(bucket, tp_index)
        facts = {each.name: each for each in self.facts.buckets[bucket]}
        for flat in (layout.trained, layout.frozen):
            for piece, _ in flat.pieces(shard) if flat else ():
                keeps = facts[piece.name].keeper(tp_index) == tp_index
                yield Kept(facts[piece.name], piece, owns_sharded and keeps)
        for piece in layout.unsharded:
            if piece.local.numel:
                yield Kept(facts[piece.name], piece, owns_rest and facts[piece.name].keeper(tp_index) == tp_index)
