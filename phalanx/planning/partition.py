"""Which consecutive blocks lie on which stage: the least of `weight` × (longest stage) + (sum of all stages).

Stages differ in what a run of blocks takes (the first ones hold more activations, devices may differ), so the caller
gives it: seconds of blocks i … j on a stage, inf where they do not fit, never less for more blocks. Pure mathematics.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

Time = Callable[[int, int, int], float]  # (stage, first block, block behind the last)
_ANY = 1e300  # a limit for all but what does not fit
_LOOSEST = 3.0  # times the smallest limit: looser ones are not looked at
_WORTH, _BETTER = 1e-4, 1 - 1e-6  # differences that are worth a look


def partition(num_blocks: int, num_stages: int, time: Time, weight: float, least: float) -> tuple[int, ...] | None:
    """Blocks of each stage; None where no way fits. least: seconds that all stages together are not below."""
    limit = _smallest_limit(num_blocks, num_stages, time, 0.999 * least / num_stages)
    if limit is None:
        return None
    best = min(_ways(num_blocks, num_stages, time, limit), key=lambda way: way.cost(weight))
    # A longer longest stage pays only where the sum gets smaller by more.
    gain = max(0.0, best.total - least)
    if gain > _WORTH * best.cost(weight):
        looser = min(limit + gain / weight, _LOOSEST * limit) if weight else _LOOSEST * limit
        best = min(_ways(num_blocks, num_stages, time, looser), key=lambda way: way.cost(weight))
    return tuple(stop - begin for begin, stop in pairwise(best.ends))


class Way(NamedTuple):
    """Some stages, the first ones: the longest of them, their sum, and where they end."""

    longest: float
    total: float
    ends: tuple[int, ...]

    def cost(self, weight: float) -> float:
        return weight * self.longest + self.total


def evenly(seconds: Sequence[float], num_stages: int) -> tuple[int, ...]:
    """Blocks of stages that are alike: each cut where the sum comes nearest to its share."""
    before = list(accumulate(seconds, initial=0.0))
    ends = [0]
    for stage in range(1, num_stages):
        share = before[-1] * stage / num_stages
        end = bisect_left(before, share)
        end -= end > 0 and share - before[end - 1] < before[end] - share
        ends.append(min(max(end, ends[-1] + 1), len(seconds) - (num_stages - stage)))
    return tuple(stop - begin for begin, stop in pairwise([*ends, len(seconds)]))


def _smallest_limit(num_blocks: int, num_stages: int, time: Time, start: float) -> float | None:
    """Of the longest stage, to a thousandth: never too small. start: a limit that is hardly ever enough."""
    ends = _greedy(num_blocks, num_stages, time, _ANY)
    if ends is None:
        return None
    low, high, most = start, start, max(time(stage, ends[stage], ends[stage + 1]) for stage in range(num_stages))
    while high < most and _greedy(num_blocks, num_stages, time, high) is None:
        low, high = high, high + 2 * (high - low) + 0.04 * start + 1e-12
    high = min(high, most)
    while high - low > 1e-3 * high:
        middle = (low + high) / 2
        if _greedy(num_blocks, num_stages, time, middle) is None:
            low = middle
        else:
            high = middle
    return high


def _greedy(num_blocks: int, num_stages: int, time: Time, limit: float) -> list[int] | None:
    """Every stage takes as many blocks as it can, and leaves one for each that follows; None where some are left."""
    ends, begin, about = [0], 0, num_blocks // num_stages
    for stage in range(num_stages):
        most = num_blocks - (num_stages - 1 - stage)
        end = _furthest(stage, begin, most, time, limit, about)
        if end is None:
            return None
        ends.append(end)
        begin, about = end, end - begin
    return ends if begin == num_blocks else None


def _furthest(stage: int, begin: int, most: int, time: Time, limit: float, about: int) -> int | None:
    """By bisection, since more blocks never take less: in growing steps from `about` so many on."""
    low, high = begin, most + 1  # the first fits or is empty, the second does not fit
    end, step = min(begin + about, most), 1
    while high - low > 1:
        if time(stage, begin, end) <= limit:
            low = end
        else:
            high = end
        if low == begin:
            end = max(high - step, low + 1)
        elif high > most:
            end = min(low + step, high - 1)
        else:
            end = (low + high) // 2
        step *= 2
    return low if low > begin else None


def _latest(num_blocks: int, num_stages: int, time: Time, limit: float) -> list[int]:
    """Where every stage may begin at the earliest: each takes as many as it can, from the last one on."""
    begins, end = [num_blocks], num_blocks
    for stage in reversed(range(num_stages)):
        begin = end - 1
        while begin > stage and time(stage, begin - 1, end) <= limit:
            begin -= 1
        begins.append(begin)
        end = begin
    return begins[::-1]


def _ways(num_blocks: int, num_stages: int, time: Time, limit: float) -> list[Way]:
    """All ways in which no stage is longer than the limit, but for those that another one beats in both."""
    latest, earliest = _greedy(num_blocks, num_stages, time, limit), _latest(num_blocks, num_stages, time, limit)
    assert latest is not None
    ways: dict[int, list[Way]] = {0: [Way(0.0, 0.0, (0,))]}
    for stage in range(num_stages):
        # The greedy way is always among them: bytes may make one block more take a little less than one fewer.
        low = min(earliest[stage + 1], latest[stage + 1]) if stage + 1 < num_stages else num_blocks
        following: dict[int, list[Way]] = {}
        for end in range(max(low, stage + 1), latest[stage + 1] + 1):
            found: list[Way] = []
            for begin, known in ways.items():
                own = time(stage, begin, end) if begin < end else math.inf
                if own <= limit:
                    found += [Way(max(w.longest, own), w.total + own, (*w.ends, end)) for w in known]
            if found:
                following[end] = _unbeaten(found)
        ways = following
    return ways[num_blocks]


def _unbeaten(ways: Iterable[Way]) -> list[Way]:
    left: list[Way] = []
    for way in sorted(ways, key=lambda way: (way.longest, way.total)):
        if not left or way.total < left[-1].total * _BETTER:
            left.append(way)
    return left
