"""How a dim is divided between the ranks of a tensor-parallel group: ranges per rank, by sections and granules.

A *section* is a part of a fused weight (the queries of a joint projection), cut by itself so that every rank gets its
share of each. A *granule* is what must stay together (the features of one head). Arithmetic only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

Range = tuple[int, int]  # from, up to but not including
Cuts = tuple[tuple[Range, ...], ...]  # per rank: ranges of the logical dim, ascending


class TooFew(Exception):
    """There is less to divide than there are ranks."""


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
        per_section = [self.given.get(start) or self._cut(start, stop, parts) for start, stop in self.sections()]
        return tuple(tuple(section[rank] for section in per_section) for rank in range(parts))

    def _cut(self, start: int, stop: int, parts: int) -> tuple[Range, ...]:
        granule = self.granules.get(start, 1)
        count = (stop - start) // granule
        if granule == 1 or count >= parts:
            return cut_evenly(start, stop, parts, granule)
        # Fewer heads than ranks: some have the same one. Only keys and values may stay so; see `tiles`.
        places = (start + granule * (rank * count // parts) for rank in range(parts))
        return tuple((place, place + granule) for place in places)


def tiles(cuts: Cuts) -> bool:
    """Whether no element lies on two ranks."""
    ranges = sorted(part for ranks in cuts for part in ranks)
    return all(before[1] <= after[0] for before, after in pairwise(ranges))


def total(ranges: tuple[Range, ...]) -> int:
    return sum(stop - start for start, stop in ranges)
