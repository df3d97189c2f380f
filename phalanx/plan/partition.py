"""Which consecutive blocks lie on which stage: the least of `weight` × (longest stage) + (sum of all stages).

Stages differ in what a run of blocks takes (the first ones hold more activations, devices may differ), so the caller
gives it: seconds of blocks i … j on a stage, inf where they do not fit, never less for more blocks. Pure mathematics.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

Time = Callable[[int, int, int], float]  # (stage, first block, block behind the last)
_ANY = 1e300  # a limit for all but what does not fit
_LOOSER = (1.0, 1.003, 1.01, 1.03, 1.1, 1.3)  # limits to try, as multiples of the smallest possible one


def partition(num_blocks: int, num_stages: int, time: Time, weight: float, start: float) -> tuple[int, ...] | None:
    """Blocks of each stage; None where no way fits. start: a limit below which no longest stage is."""
    limit = _smallest_limit(num_blocks, num_stages, time, start)
    if limit is None:
        return None
    best, found = math.inf, None
    for factor in _LOOSER:
        ends, total = _least_sum(num_blocks, num_stages, time, limit * factor)
        longest = max(time(stage, ends[stage], ends[stage + 1]) for stage in range(num_stages))
        if weight * longest + total >= best:
            break
        best, found = weight * longest + total, ends
    assert found is not None
    return tuple(stop - begin for begin, stop in pairwise(found))


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
    """Of the longest stage, to a ten-thousandth."""
    low, high = start, start
    while _greedy(num_blocks, num_stages, time, high) is None:
        low, high = high, high * 1.25 + 1e-12
        if high > 50 * start:
            high = _ANY
            break
    if high == _ANY:
        ends = _greedy(num_blocks, num_stages, time, _ANY)
        if ends is None:
            return None
        high = max(time(stage, ends[stage], ends[stage + 1]) for stage in range(num_stages))
    while high - low > 1e-4 * high:
        middle = (low + high) / 2
        if _greedy(num_blocks, num_stages, time, middle) is None:
            low = middle
        else:
            high = middle
    return high


def _greedy(num_blocks: int, num_stages: int, time: Time, limit: float) -> list[int] | None:
    """Every stage takes as many blocks as it can, and leaves one for each that follows; None where some are left."""
    ends, begin = [0], 0
    for stage in range(num_stages):
        most = num_blocks - (num_stages - 1 - stage)
        end = _furthest(stage, begin, most, time, limit)
        if end is None:
            return None
        ends.append(end)
        begin = end
    return ends if begin == num_blocks else None


def _furthest(stage: int, begin: int, most: int, time: Time, limit: float) -> int | None:
    """By bisection: more blocks never take less."""
    if most <= begin or time(stage, begin, begin + 1) > limit:
        return None
    low, step = begin + 1, 1
    while low + step <= most and time(stage, begin, low + step) <= limit:
        low, step = low + step, 2 * step
    high = min(low + step, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        if time(stage, begin, middle) <= limit:
            low = middle
        else:
            high = middle
    return low


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


def _least_sum(num_blocks: int, num_stages: int, time: Time, limit: float) -> tuple[list[int], float]:
    """Of all ways in which no stage is longer than the limit, the one with the least sum."""
    latest, earliest = _greedy(num_blocks, num_stages, time, limit), _latest(num_blocks, num_stages, time, limit)
    assert latest is not None
    sums: dict[int, tuple[float, list[int]]] = {0: (0.0, [0])}
    for stage in range(num_stages):
        low = earliest[stage + 1] if stage + 1 < num_stages else num_blocks
        following: dict[int, tuple[float, list[int]]] = {}
        for end in range(max(low, stage + 1), latest[stage + 1] + 1):
            for begin, (total, ends) in sums.items():
                own = time(stage, begin, end) if begin < end else math.inf
                if own <= limit and total + own < following.get(end, (math.inf, []))[0]:
                    following[end] = (total + own, [*ends, end])
        sums = following
    total, ends = sums[num_blocks]
    return ends, total
