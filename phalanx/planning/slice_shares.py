"""How the cost of a micro-batch is shared among slices of its tokens, where a later token attends to more before it.

Pure arithmetic for planning, by one number: the share of the time that attention takes. `slice_search.py` finds the
best slicing from times of slices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise


def up_to(length: float, attention: float) -> float:
    """The share of the cost of a micro-batch that its first tokens have. length: their share of the tokens."""
    return (1 - attention) * length + attention * length**2


def slowest(slicing: Sequence[int], attention: float) -> float:
    """The share of the cost of a micro-batch that its longest slice has. slicing: relative lengths."""
    whole = sum(slicing)
    ends = [up_to(end / whole, attention) for end in accumulate(slicing, initial=0)]
    return max(end - begin for begin, end in pairwise(ends))


def equal(count: int, attention: float, grains: int) -> tuple[int, ...]:
    """Lengths of so many slices that cost about the same, in grains of which a micro-batch has so many."""
    assert 1 <= count <= grains
    ends = [0]
    for place in range(1, count):
        share = place / count
        root = math.sqrt((1 - attention) ** 2 + 4 * attention * share)
        length = 2 * share / (1 - attention + root)  # of a quadratic equation, also where attention is nothing
        ends.append(min(max(round(length * grains), ends[-1] + 1), grains - (count - place)))
    lengths = [end - begin for begin, end in pairwise([*ends, grains])]
    shared = math.gcd(*lengths)
    return tuple(length // shared for length in lengths)
