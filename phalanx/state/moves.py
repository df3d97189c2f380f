"""From one layout to another: which boxes must be copied between which ranks. Pure, and the same on every rank.

Ranks that hold the same boxes are handled together and boxes of a tensor are found by where they begin, so planning
takes little more time than going through both layouts. Copying is `reshard`'s work.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from functools import cached_property
from heapq import heapify, heapreplace
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

from phalanx.state.layout import Box, Layout, StateShard, placed

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

    def span(self, box: Box) -> tuple[int, int] | None:
        """Where the elements of `box` begin and end in the flat data, if they lie there one after the other."""
        start, is_inside = self.start, False  # is_inside: a dim before this one is cut
        stride = self.held.numel
        for begin, size, own_begin, own_size in zip(
            box.offset, box.shape, self.held.offset, self.held.shape, strict=True
        ):
            if is_inside and size != own_size:
                return None
            stride //= own_size
            start += (begin - own_begin) * stride
            is_inside = is_inside or size > 1
        return start, start + box.numel


class Move(NamedTuple):
    """The elements of `box` of one tensor go from one rank's data to another's (or within one rank's)."""

    name: str
    dtype: str
    source: int
    destination: int
    box: Box
    taken_from: Place
    put_to: Place


Boxes = tuple[Box, ...]
Held = list[tuple[int, Boxes]]  # the boxes of one tensor on each rank
Part = tuple[int, Box, int]  # the number of a source, the box that it gives, and its elements


def plan_moves(old: Layout, new: Layout) -> list[Move]:
    """Every element of the new layout exactly once, from the rank itself where it has it, else from another.

    Of several ranks that could send, the one that sends least so far does, an owner before a replica. The result
    depends on nothing but the two layouts.
    """
    sources, wanted = _by_name(old), _by_name(new)
    sent = Counter[int]()
    cuts: dict[Boxes, _Cuts] = {}
    known: dict[_Key, _Sources] = {}
    alike: dict[tuple[_Key, _Key], tuple[list[tuple[Any, ...]], Counter[int]]] = {}
    moves: list[Move] = []
    for name in sorted(wanted):
        held, own = sources.get(name, []), wanted[name]
        key, pair = _key(held), (_key(held), _key(own))
        if key not in known:  # a parameter and its averages lie in the same boxes
            known[key] = _Sources([(rank, shard.boxes) for rank, shard in held], cuts)
        _check_kind(name, [*held, *own])
        if pair in alike:
            before, given = alike[pair]
            kind = (name, own[0][1].dtype)
            moves += [Move._make(kind + move) for move in before]
            sent += given
            continue
        found = list(_moves_of(known[key], {rank for rank, shard in held if not shard.owned}, own, sent))
        moves += found
        if not known[key].has_choice:
            alike[pair] = [move[2:] for move in found], _sent(found)
    return moves


_Key = tuple[tuple[int, int], ...]  # the identity of the boxes of a tensor on each rank


def _key(shards: Shards) -> _Key:
    return tuple((rank, id(shard.boxes)) for rank, shard in shards)


def _sent(moves: Iterable[Move]) -> Counter[int]:
    """Elements that each rank sends to others."""
    found = Counter[int]()
    for move in moves:
        if move.source != move.destination:
            found[move.source] += move.box.numel
    return found


Shards = list[tuple[int, StateShard]]


def _by_name(layout: Layout) -> dict[str, Shards]:
    found: dict[str, Shards] = defaultdict(list)
    for rank in sorted(layout):
        for shard in layout[rank]:
            found[shard.name].append((rank, shard))
    return found


def _check_kind(name: str, shards: Shards) -> None:
    shape, dtype = shards[0][1].shape, shards[0][1].dtype
    for _, shard in shards:
        assert shard.dtype == dtype and shard.shape == shape, f"{name} changes its kind"


def _moves_of(sources: _Sources, replicas: set[int], wanted: Shards, sent: Counter[int]) -> Iterator[Move]:
    """Covers what every destination wants of one tensor; `sent` counts the elements that each rank sends to others."""
    senders = _Senders(sources, replicas, sent)
    for rank, shard in wanted:
        for put_to, parts in sources.cuts.cover(shard.boxes):
            if parts is None:
                parts = _chosen(sources, senders, rank, shard.name, put_to.held)
            for number, box, numel in parts:
                places = sources.places[number]
                sender = rank
                if rank not in places:
                    sender = senders.next(number)
                    sent[sender] += numel
                yield Move(shard.name, shard.dtype, sender, rank, box, places[sender], put_to)


def _chosen(sources: _Sources, senders: _Senders, rank: int, name: str, box: Box) -> Iterator[Part]:
    """Of sources that overlap each other the rank's own first, then those whose next sender has sent least."""
    left = [box]
    found = sources.cuts.overlaps(box)
    for number, common, _ in sorted(found, key=lambda it: (rank not in sources.places[it[0]], *senders.order(it[0]))):
        for part in (each.intersect(common) for each in left):
            if part is not None:
                yield number, part, part.numel
        left = [rest for each in left for rest in each.without(common)]
    assert not left, f"no rank holds {left} of {name}, which rank {rank} needs"


class _Senders:
    """Who of the ranks that hold a source's box sends next: the one that has sent least, an owner before a replica."""

    def __init__(self, sources: _Sources, replicas: set[int], sent: Counter[int]) -> None:
        self._sources, self._replicas, self._sent = sources, replicas, sent
        self._queues: dict[int, list[tuple[int, bool, int]]] = {}  # heaps of (sent so far, whether a replica, rank)

    def next(self, number: int) -> int:
        places = self._sources.places[number]
        return self.order(number)[2] if len(places) > 1 else next(iter(places))

    def order(self, number: int) -> tuple[int, bool, int]:
        """Counts only grow, so the first in the heap that is up to date has sent least."""
        sent, queue = self._sent, self._queues.get(number)
        if queue is None:
            queue = [(sent[rank], rank in self._replicas, rank) for rank in self._sources.places[number]]
            heapify(queue)
            self._queues[number] = queue
        while queue[0][0] != sent[queue[0][2]]:
            _, replica, rank = queue[0]
            heapreplace(queue, (sent[rank], replica, rank))
        return queue[0]


class _Sources:
    """Who holds which box of one tensor, and where."""

    def __init__(self, held: Held, cuts: dict[Boxes, _Cuts]) -> None:
        by_box: dict[Box, dict[int, Place]] = {}
        seen: dict[int, list[tuple[dict[int, Place], Place]]] = {}  # ranks that hold the same share their boxes
        for rank, boxes in held:
            if id(boxes) not in seen:
                seen[id(boxes)] = [(by_box.setdefault(place.held, {}), place) for place in _places(boxes)]
            for places, place in seen[id(boxes)]:
                places[rank] = place
        distinct = tuple(by_box)
        if distinct not in cuts:  # layers of a model are cut alike
            cuts[distinct] = _Cuts(distinct)
        self.cuts = cuts[distinct]
        self.places = [by_box[box] for box in self.cuts.boxes]

    @cached_property
    def has_choice(self) -> bool:
        """Whether it may depend on what ranks sent before who sends what."""
        return not self.cuts.is_disjoint or any(len(places) > 1 for places in self.places)


class _Cuts:
    """The distinct boxes that a tensor lies in, in order along the dim in which most of them differ."""

    def __init__(self, boxes: Boxes) -> None:
        dims = range(len(boxes[0].shape) if boxes else 0)
        self._dim = max(dims, key=lambda dim: len({box.offset[dim] for box in boxes}), default=None)
        self.boxes = sorted(boxes, key=lambda box: (self._begin(box), box.offset))
        self._begins = [self._begin(box) for box in self.boxes]
        self._reach = list(accumulate(map(self._end, self.boxes), max))
        self._covers: dict[Boxes, list[tuple[Place, list[Part] | None]]] = {}

    def cover(self, boxes: Boxes) -> list[tuple[Place, list[Part] | None]]:
        """What each box is made of; None where that depends on who wants it, or where something is missing."""
        if boxes not in self._covers:
            found = [(place, self.overlaps(place.held)) for place in _places(boxes)]
            self._covers[boxes] = [
                (place, parts if self.is_disjoint and sum(part[2] for part in parts) == place.held.numel else None)
                for place, parts in found
            ]
        return self._covers[boxes]

    def overlaps(self, box: Box) -> list[Part]:
        """The boxes that hold some of one, and what of it."""
        first = bisect_right(self._reach, self._begin(box))
        last = bisect_left(self._begins, self._end(box))
        found = ((number, self.boxes[number].intersect(box)) for number in range(first, last))
        return [(number, common, common.numel) for number, common in found if common is not None]

    @cached_property
    def is_disjoint(self) -> bool:
        """Whether no two boxes overlap, so that what covers another does not depend on who wants it."""
        reached: list[Box] = []
        for box in self.boxes:
            reached = [other for other in reached if self._end(other) > self._begin(box)]
            if any(other.intersect(box) for other in reached):
                return False
            reached.append(box)
        return True

    def _begin(self, box: Box) -> int:
        return box.offset[self._dim] if self._dim is not None else 0

    def _end(self, box: Box) -> int:
        return box.offset[self._dim] + box.shape[self._dim] if self._dim is not None else 1


def _places(boxes: Boxes) -> list[Place]:
    return [Place(box, start) for box, start in placed(boxes) if box.numel]
