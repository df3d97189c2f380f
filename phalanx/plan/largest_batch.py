"""The largest batch that fits in a memory, by what is predicted of each that is tried."""

from __future__ import annotations

from collections.abc import Callable

_MOST = 1 << 20  # samples


def largest_batch(needs: Callable[[int], int], budget: int, multiple: int = 1) -> int | None:
    """The largest multiple of `multiple` for which `needs` is at most `budget`; None if not even the first is. needs:
    the bytes that a batch takes, which never fall as it grows."""
    if needs(multiple) > budget:
        return None
    fits = 1  # so many multiples do
    while fits * multiple < _MOST and needs(2 * fits * multiple) <= budget:
        fits *= 2
    too_many = 2 * fits
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        if needs(middle * multiple) <= budget:
            fits = middle
        else:
            too_many = middle
    return fits * multiple
