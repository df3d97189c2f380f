"""How a split survives a reshape: dims that are divided or merged, in groups of equal size."""

from __future__ import annotations

import math
from collections.abc import Sequence

from phalanx.model.shard.cuts import Cutting
from phalanx.model.shard.placement import Conflict, Origin, Placement
from phalanx.model.shard.walk import Walk


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


def carried(walk: Walk, place: Placement, before: Sequence[int], after: Sequence[int]) -> Placement:
    """Where a split lies after a reshape. The split dim must be the outermost of what is divided or merged."""
    old, new = next((o, n) for o, n in groups(before, after) if place.dim in o)
    outer = [d for d in old if d < place.dim and before[d] != 1]
    if outer:
        raise Conflict("a split dim is merged into another", place)
    inner_before = math.prod(before[d] for d in old if d > place.dim)
    target = new[0]  # a new dim of size 1 may be the only key/value head: it stays whole, and every rank has it
    inner_after = math.prod(after[d] for d in new if d > target)
    if inner_after >= inner_before:  # divided: whole inner parts stay together
        by = inner_after // inner_before
        if any(edge % by for ranges in place.cuts for part in ranges for edge in part):
            _keep_together(walk, place, by)
        return place.scaled(target, by=by)
    times = inner_before // inner_after
    assert place.origin is not None
    if place.origin.unit % times:
        raise Conflict("a split dim is merged with one that its weight does not hold", place)
    return place.scaled(target, times=times)


def _keep_together(walk: Walk, place: Placement, by: int) -> None:
    def change(cutting: Cutting, origin: Origin) -> bool:
        start, stop = cutting.section_at(origin.offset)
        granule = math.lcm(cutting.granules.get(start, 1), by * origin.unit)
        if granule == cutting.granules.get(start, 1) or (stop - start) % granule:
            return False
        cutting.granules[start] = granule
        cutting.given.pop(start, None)
        return True

    walk.refine(place, change)
