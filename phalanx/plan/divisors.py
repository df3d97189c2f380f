"""Divisors, of which a plan's numbers are made, and how a few numbers are listed in words."""

from __future__ import annotations

import math
from collections.abc import Iterable


def divisors(number: int) -> list[int]:
    """In rising order."""
    assert number >= 1
    low = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    return sorted({*low, *(number // divisor for divisor in low)})


def listed(choices: Iterable[int | str]) -> str:
    """`1, 2 or 4`."""
    *others, last = map(str, choices)
    return f"{', '.join(others)} or {last}" if others else last
