"""How a value lies across the ranks of a unit's tensor-parallel group, and how a dim is divided between them.

Whole: every rank has all of it. Tokens: each has some tokens of it (the sequence split). Split: each has ranges of one
other dim. Partial: each has a summand. Stacked: each has a part that is to be stacked with those of the others.

A *section* is a part of a fused weight (the queries of a joint projection), cut by itself so that every rank gets its
share of each. A *granule* is what must stay together (the features of one head). Arithmetic only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import pairwise
from typing import Any

Range = tuple[int, int]  # from, up to but not including
Cuts = tuple[tuple[Range, ...], ...]  # per rank: ranges of the logical dim, ascending


class TooFew(Exception):
    """There is less to divide than there are ranks."""


class NoElement(Exception):
    """What a split dim counts is not made of whole elements of the weight that the split began with."""


def cut_evenly(start: int, stop: int, parts: int, granule: int = 1) -> tuple[Range, ...]:
    """As even as whole granules allow, larger ones first."""
    count, rest = divmod(stop - start, granule)
    if rest:
        raise TooFew(f"{stop - start} is not a multiple of {granule}")
    if count < parts:
        raise TooFew(f"{count} cannot be divided between {parts} ranks")
    size, larger = divmod(count, parts)
    ends = [start + granule * (size * n + min(n, larger)) for n in range(parts + 1)]
    return tuple((ends[n], ends[n + 1]) for n in range(parts))


def cut_heads(heads: int, kv_heads: int, parts: int) -> tuple[tuple[Range, ...], tuple[Range, ...]]:
    """Heads and key/value heads of each rank, such that every rank's heads find their keys and values on it.

    With fewer key/value heads than ranks, several ranks keep the same one and divide the heads that use it.
    """
    if heads < parts:
        raise TooFew(f"{heads} heads cannot be divided between {parts} ranks")
    group = heads // kv_heads
    if kv_heads >= parts:
        kv = cut_evenly(0, kv_heads, parts)
        return tuple((start * group, stop * group) for start, stop in kv), kv
    owners = cut_evenly(0, parts, kv_heads)  # the ranks that share each key/value head
    q: list[Range] = []
    kv_ranges: list[Range] = []
    for head, (first, last) in enumerate(owners):
        q += cut_evenly(head * group, (head + 1) * group, last - first)
        kv_ranges += [(head, head + 1)] * (last - first)
    return tuple(q), tuple(kv_ranges)


@dataclass
class Cutting:
    """What is known so far about how one dim of one weight must be cut."""

    size: int
    bounds: set[int] = field(default_factory=set)  # where sections begin
    granules: dict[int, int] = field(default_factory=dict)  # by the section's start
    given: dict[int, tuple[Range, ...]] = field(default_factory=dict)  # ranges per rank, by the section's start

    def sections(self) -> list[Range]:
        edges = sorted({0, self.size} | self.bounds)
        return list(pairwise(edges))

    def section_at(self, place: int) -> Range:
        return next((start, stop) for start, stop in self.sections() if start <= place < stop)

    def cuts(self, parts: int) -> Cuts:
        sections = [
            self.given.get(start) or self._cut(start, stop, parts, number)
            for number, (start, stop) in enumerate(self.sections())
        ]
        found = tuple(tuple(part for part in ranges if part[0] < part[1]) for ranges in zip(*sections, strict=True))
        if not all(found):
            raise TooFew("some ranks would have nothing")
        return found

    def _cut(self, start: int, stop: int, parts: int, number: int) -> tuple[Range, ...]:
        granule = self.granules.get(start, 1)
        count = (stop - start) // granule
        if granule == 1 or count >= parts:
            return cut_evenly(start, stop, parts, granule)
        if self.bounds:
            return _deal_out(start, granule, count, parts, number)
        # Fewer heads than ranks: some have the same one. Only keys and values may stay so; see `tiles`.
        places = (start + granule * (rank * count // parts) for rank in range(parts))
        return tuple((place, place + granule) for place in places)


def _deal_out(start: int, granule: int, count: int, parts: int, turn: int) -> tuple[Range, ...]:
    """Fewer granules of a section than ranks: some have one, the others nothing. Ranks never have the same, because
    other sections of the weight differ, and gradients are summed over ranks that have the same of all of it."""
    dealt = [(start, start)] * parts
    for index in range(count):
        first = start + granule * index
        dealt[(index * parts // count + turn) % parts] = first, first + granule
    return tuple(dealt)


def tiles(cuts: Cuts) -> bool:
    """Whether no element lies on two ranks."""
    ranges = sorted(part for ranks in cuts for part in ranks)
    return all(before[1] <= after[0] for before, after in pairwise(ranges))


def total(ranges: tuple[Range, ...]) -> int:
    return sum(stop - start for start, stop in ranges)


def groups(before: Sequence[int], after: Sequence[int]) -> list[tuple[range, range]]:
    """Runs of dims before and after that hold the same elements."""
    found: list[tuple[range, range]] = []
    i = j = 0
    while i < len(before) or j < len(after):
        first_i, first_j = i, j
        left = right = 1
        while i < len(before) and before[i] == 1 and (j >= len(after) or after[j] != 1):
            i += 1
        while j < len(after) and after[j] == 1 and (i >= len(before) or before[i] != 1):
            j += 1
        if i < len(before):
            left, i = before[i], i + 1
        if j < len(after):
            right, j = after[j], j + 1
        while left != right:
            if left < right:
                left, i = left * before[i], i + 1
            else:
                right, j = right * after[j], j + 1
        found.append((range(first_i, i), range(first_j, j)))
    return found


@dataclass(frozen=True)
class Origin:
    """Where a split began: index i of the split dim is element `offset + i * unit` of the cut dim of `weight`. The unit
    is a fraction where a head has more features than its weight gives it, as attention with wider values makes them."""

    product: Any  # the node that began it
    weight: Any  # its parameter
    offset: int = 0
    unit: Fraction = Fraction(1)
    joined: bool = False  # the dim holds several splits, or one several times: no index is one element of the weight
    last: Any = None  # the last product on the way that could have ended the split as a sum, but did not

    def element(self, index: int) -> int:
        return self.offset + self.elements(index)

    def elements(self, count: int) -> int:
        """How many elements so many indices are."""
        found = count * self.unit
        if self.joined or found.denominator != 1:
            raise NoElement
        return int(found)


@dataclass(frozen=True)
class Placement:
    """outer: how often the split dim is repeated in `dim`, where a reshape merged it with dims outside of it: heads of
    every sample in one dim. `cuts` are of one repetition."""

    kind: str
    dim: int = -1
    cuts: Cuts = ()
    origin: Origin | None = None
    outer: int = 1

    @property
    def is_heavy(self) -> bool:
        """Whether ranks compute different things: their gradients towards what is whole are summands."""
        return self.kind in ("split", "partial", "stacked")

    @property
    def is_everywhere(self) -> bool:
        """Whether a split gives every rank the same, as it does with the only key/value head."""
        return self.kind == "split" and len(set(self.cuts)) == 1

    def moved(self, dim: int) -> Placement:
        return replace(self, dim=dim)

    def scaled(self, dim: int, times: int = 1, by: int = 1) -> Placement:
        """Indices multiplied by `times` and divided by `by`, which must divide them."""
        assert self.origin is not None
        cuts = tuple(tuple((a * times // by, b * times // by) for a, b in ranges) for ranges in self.cuts)
        return replace(self, dim=dim, cuts=cuts, origin=replace(self.origin, unit=self.origin.unit * by / times))

    def joined(self, cuts: Cuts) -> Placement:
        """A dim that holds more than this split."""
        assert self.origin is not None
        return replace(self, cuts=cuts, origin=replace(self.origin, joined=True))

    def same_as(self, other: Placement) -> bool:
        return (self.kind, self.dim, self.cuts, self.outer) == (other.kind, other.dim, other.cuts, other.outer)


WHOLE = Placement("whole")
PARTIAL = Placement("partial")
STACKED = Placement("stacked")
TOKENS = Placement("tokens", 1)  # of [samples, tokens, features]


class Conflict(Exception):
    """A value cannot lie as its users need it; the products that began these splits are done whole instead."""

    def __init__(self, reason: str, *placements: Placement) -> None:
        super().__init__(reason)
        self.origins = [p.origin for p in placements if p.origin is not None]


class Refined(Exception):
    """A cut has become more exact; everything is placed again."""
