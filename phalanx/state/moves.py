"""From one layout to another: which boxes must be copied between which ranks. Pure, and the same on every rank.

Ranks that hold the same boxes are handled together and boxes of a tensor are found by where they begin, so planning
takes little more time than going through both layouts. Copying is `reshard`'s work.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from functools import cached_property
from heapq import heapify, heapreplace
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from phalanx.state.layout import Box, Layout, StateShard

if TYPE_CHECKING:
    from torch import Tensor


class Place(NamedTuple):
    """A held box, and where its elements begin in the flat data of the rank that holds it."""

    held: Box
    start: int

    def view(self, data: Tensor, box: Box) -> Tensor:
        """The elements of `box`, which lies in the held one, as a tensor of its shape."""
        held = data[self.start : self.start + self.held.numel].view(self.held.shape)
        return held[box.relative_to(self.held).slices()]


class Move(NamedTuple):
    """The elements of `box` of one tensor go from one rank's data to another's (or within one rank's)."""

    name: str
    dtype: str
    source: int
    destination: int
    box: Box
    taken_from: Place
    put_to: Place


Shards = list[tuple[int, StateShard]]  # what each rank holds of one tensor, by rank


def plan_moves(old: Layout, new: Layout) -> list[Move]:
    """Every element of the new layout exactly once, from the rank itself where it has it, else from another.

    Of several ranks that could send, the one that sends least so far does, an owner before a replica. The result
    depends on nothing but the two layouts.
    """
    sources, sent = _by_name(old), Counter[int]()
    return [
        move
        for name, wanted in sorted(_by_name(new).items())
        for move in _Tensor(sources.get(name, [])).to(wanted, sent)
    ]


def _by_name(layout: Layout) -> dict[str, Shards]:
    found: dict[str, Shards] = defaultdict(list)
    for rank in sorted(layout):
        for shard in layout[rank]:
            found[shard.name].append((rank, shard))
    return found


class _Source:
    """A box that some ranks hold: where each has it, and who of them sends next."""

    def __init__(self, box: Box) -> None:
        self.box = box
        self.places: dict[int, Place] = {}
        self._replicas: set[int] = set()
        self._queue: list[tuple[int, bool, int]] = []  # (elements sent so far, whether a replica, rank), a heap

    def add(self, rank: int, place: Place, owned: bool) -> None:
        self.places[rank] = place
        if not owned:
            self._replicas.add(rank)

    def sender(self, sent: Counter[int]) -> int:
        """The rank that has sent least. Counts only grow, so the first one that is up to date is the least."""
        if not self._queue:
            self._queue = [(sent[rank], rank in self._replicas, rank) for rank in self.places]
            heapify(self._queue)
        while self._queue[0][0] != sent[self._queue[0][2]]:
            _, replica, rank = self._queue[0]
            heapreplace(self._queue, (sent[rank], replica, rank))
        return self._queue[0][2]

    def order(self, sent: Counter[int]) -> tuple[int, bool, int]:
        rank = self.sender(sent)
        return sent[rank], rank in self._replicas, rank


class _Tensor:
    """The boxes of one tensor that ranks hold, in order along the dim in which most of them differ."""

    def __init__(self, shards: Shards) -> None:
        self._kind = (shards[0][1].shape, shards[0][1].dtype) if shards else None
        by_box: dict[Box, _Source] = {}
        seen: dict[int, list[tuple[_Source, Place]]] = {}  # by the identity of boxes that ranks share
        for rank, shard in shards:
            assert (shard.shape, shard.dtype) == self._kind, f"ranks disagree on what {shard.name} is"
            if id(shard.boxes) not in seen:
                places = [Place(box, start) for box, start in shard.places() if box.numel]
                seen[id(shard.boxes)] = [(by_box.setdefault(p.held, _Source(p.held)), p) for p in places]
            for source, place in seen[id(shard.boxes)]:
                source.add(rank, place, shard.owned)
        boxes = list(by_box)
        dims = range(len(boxes[0].shape) if boxes else 0)
        self._dim = max(dims, key=lambda dim: len({box.offset[dim] for box in boxes}), default=None)
        self._sources = sorted(by_box.values(), key=lambda source: (self._begin(source.box), source.box.offset))
        self._begins = [self._begin(source.box) for source in self._sources]
        self._reach = list(accumulate((self._end(source.box) for source in self._sources), max))

    def to(self, wanted: Shards, sent: Counter[int]) -> Iterator[Move]:
        """Covers what every destination wants; `sent` counts the elements that each rank sends to others."""
        seen: dict[int, list[tuple[Place, list[tuple[_Source, Box]]]]] = {}
        for rank, shard in wanted:
            if id(shard.boxes) not in seen:
                places = [Place(box, start) for box, start in shard.places() if box.numel]
                seen[id(shard.boxes)] = [(place, self._overlaps(place.held)) for place in places]
            for put_to, overlaps in seen[id(shard.boxes)]:
                assert self._kind in (None, (shard.shape, shard.dtype)), f"{shard.name} changes its kind"
                if self._is_disjoint and sum(box.numel for _, box in overlaps) == put_to.held.numel:
                    parts = overlaps
                else:
                    parts = self._cover(rank, shard.name, put_to.held, overlaps, sent)
                for source, box in parts:
                    sender = rank
                    if rank not in source.places:
                        sender = source.sender(sent)
                        sent[sender] += box.numel
                    yield Move(shard.name, shard.dtype, sender, rank, box, source.places[sender], put_to)

    def _overlaps(self, box: Box) -> list[tuple[_Source, Box]]:
        """The sources that hold some of a box, and what of it."""
        first = bisect_right(self._reach, self._begin(box))
        last = bisect_left(self._begins, self._end(box))
        found = [(source, source.box.intersect(box)) for source in self._sources[first:last]]
        return [(source, common) for source, common in found if common is not None]

    def _cover(
        self, rank: int, name: str, box: Box, overlaps: Sequence[tuple[_Source, Box]], sent: Counter[int]
    ) -> Iterator[tuple[_Source, Box]]:
        """Of sources that overlap each other the rank's own first, then those whose next sender has sent least."""
        left = [box]
        for source, common in sorted(overlaps, key=lambda it: (rank not in it[0].places, *it[0].order(sent))):
            yield from ((source, part) for part in (each.intersect(common) for each in left) if part is not None)
            left = [rest for each in left for rest in each.without(common)]
        assert not left, f"no rank holds {left} of {name}, which rank {rank} needs"

    @cached_property
    def _is_disjoint(self) -> bool:
        """Whether no two sources overlap, so that what covers a box does not depend on who wants it."""
        reached: list[Box] = []
        for source in self._sources:
            reached = [box for box in reached if self._end(box) > self._begin(source.box)]
            if any(box.intersect(source.box) for box in reached):
                return False
            reached.append(source.box)
        return True

    def _begin(self, box: Box) -> int:
        return box.offset[self._dim] if self._dim is not None else 0

    def _end(self, box: Box) -> int:
        return box.offset[self._dim] + box.shape[self._dim] if self._dim is not None else 1
