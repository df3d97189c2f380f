"""Which blocks form a stage: consecutive ones, so that the slowest stage is as fast as it can be.

The result is exact, not a heuristic. What a block costs is the caller's knowledge.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate, pairwise

from phalanx.errors import PlanError


def balance(costs: Sequence[float], num_stages: int) -> tuple[int, ...]:
    """Blocks per stage, at least one each, with the smallest possible largest stage.

    Of those, the ones with the smallest sum of squared stage costs; of those, fewer blocks first, because under 1F1B
    earlier stages hold the activations of more micro-batches.
    """
    num_blocks = len(costs)
    assert num_stages >= 1 and all(cost >= 0 for cost in costs)
    if num_blocks < num_stages:
        message = f"plan: {num_stages} stages need at least as many blocks, and the model has {num_blocks}"
        raise PlanError(message, f"use fewer stages: pp × v of {num_blocks} or less")
    if not any(costs):
        costs = [1.0] * num_blocks  # with nothing to tell them apart, by number
    before = list(accumulate(costs, initial=0.0))  # cost of all blocks before block i
    return _most_even(before, num_stages, _smallest_largest(before, num_stages))


def _smallest_largest(before: list[float], num_stages: int) -> float:
    """The cost of the largest stage, when that is as small as possible."""
    best = before  # best[i]: the largest of k stages made of the first i blocks; k = 1
    for k in range(2, num_stages + 1):
        following = [math.inf] * len(before)
        for i in range(k, len(before)):
            # The last stage begins at `cut`: later cuts make it smaller and the stages before it larger, so the best
            # cut is where the two cross, or just before.
            cuts = range(k - 1, i)
            cross = bisect_left(cuts, True, key=lambda cut, i=i, best=best: best[cut] >= before[i] - before[cut])
            near = cuts[max(cross - 1, 0) : cross + 1]
            following[i] = min(max(best[cut], before[i] - before[cut]) for cut in near)
        best = following
    return best[-1]


def _most_even(before: list[float], num_stages: int, limit: float) -> tuple[int, ...]:
    """The stages with the smallest sum of squares of which none costs more than `limit`."""
    num_blocks = len(before) - 1
    squares = [math.inf] * num_blocks + [0.0]  # squares[i]: the smallest sum for the blocks from i on, in k stages
    ends: list[list[int]] = []  # ends[k - 1][i]: where the first of those stages ends
    for k in range(1, num_stages + 1):
        following, end = [math.inf] * (num_blocks + 1), [num_blocks] * (num_blocks + 1)
        for i in range(num_blocks - k, -1, -1):
            for j in range(i + 1, num_blocks - k + 2):
                cost = before[j] - before[i]
                if cost > limit:
                    break
                if squares[j] + cost * cost < following[i]:
                    following[i], end[i] = squares[j] + cost * cost, j
        squares = following
        ends.append(end)
    cuts = [0]
    for end in reversed(ends):
        cuts.append(end[cuts[-1]])
    return tuple(stop - start for start, stop in pairwise(cuts))
