"""Few layers of a stage, one after the other: of all ways to treat them that fit into memory the one that takes least
time, where what a layer takes depends on over how many ranks the one before it is split.

Where there are many layers, such changes are few and `mixes.py` does without their order.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from phalanx.planning.mixes import Ends, Mix, Numbers, Option

MOST_LAYERS = 6
MOST_ROWS = 10_000


def most_options(num_layers: int) -> int:
    """Of so many layers, the options that may all be tried."""
    return int(MOST_ROWS ** (1 / num_layers) + 1e-9)


@lru_cache(maxsize=64)
def _rows(num_layers: int, num_options: int) -> NDArray[np.int64]:
    """[row, layer]: every way to give each layer an option."""
    return np.indices((num_options,) * num_layers).reshape(num_layers, -1).T


class Taken(NamedTuple):
    """By a block of a micro-batch: seconds; seconds to sum its gradients; of its backward, behind which that may hide;
    and to sum them if nothing hides it."""

    seconds: float
    reduce: float
    window: float
    last: float


def together(every: Sequence[Taken]) -> Taken:
    seconds, reduce, window = (sum(getattr(own, name) for own in every) for name in ("seconds", "reduce", "window"))
    return Taken(seconds, reduce, window, max((own.last for own in every), default=0.0))


class Beside(NamedTuple):
    """What stands beside the layers of a place. entering: the degree, by its place, of what enters the first; None: as
    the layer would have it. leaving: what all these blocks take, behind a last layer of each degree."""

    entering: int | None
    leaving: Sequence[Taken]


class Sequences:
    """options: of one layer. taken[option][degree]: where what enters it has that degree, by its place in `degrees`.
    times: how often gradients are summed for a micro-batch."""

    def __init__(
        self, options: Sequence[Option], taken: Sequence[Sequence[Taken]], degrees: Sequence[int], times: float,
        contention: float,
    ) -> None:  # fmt: skip
        self._options, self._times, self._contention = options, times, contention
        self._taken = np.array(taken)  # [option, degree, number]
        self._kept, self._working, self._state = (
            np.array([getattr(option, name) for option in options]) for name in ("kept", "working", "state")
        )
        self._first, self._last = (
            np.array([degrees.index(option.degrees[0][end]) for option in options]) for end in (0, -1)
        )

    def best(
        self, num_layers: int, held: float, room: float, ends: Ends, beside: Beside
    ) -> Mix | None:  # fmt: skip
        """held, room: as of a mix."""
        rows = _rows(num_layers, len(self._options))
        kept: Numbers = ends.first_kept + np.cumsum(self._kept[rows], axis=1, dtype=np.float64)
        moments = (kept + self._working[rows]).max(axis=1)
        whole = kept[:, -1] + ends.last_kept
        peak = np.maximum(np.maximum(moments, ends.first_kept + ends.first_working), whole + ends.last_working)
        fits = (held - 1) * whole + peak + self._state[rows].sum(axis=1) <= room
        if not fits.any():
            return None
        seconds = self._seconds(rows[fits], beside)
        place = int(seconds.argmin())
        chosen = [self._options[option] for option in rows[fits][place]]
        return Mix(tuple((option, 1) for option in chosen), float(seconds[place]))

    def _seconds(self, rows: NDArray[np.int64], beside: Beside) -> Numbers:
        first = self._first[rows[:, :1]] if beside.entering is None else np.full((len(rows), 1), beside.entering)
        before = np.concatenate([first, self._last[rows[:, :-1]]], axis=1)
        others = np.array(beside.leaving)[self._last[rows[:, -1]]]
        seconds, reduce, window, _ = np.moveaxis(self._taken[rows, before].sum(axis=1) + others, 1, 0)
        last = np.maximum(self._taken[rows, before, -1].max(axis=1), others[:, -1])
        covered = np.minimum(reduce, window)
        waits = np.maximum(reduce - covered + self._contention * covered, np.minimum(reduce, last))
        return seconds + self._times * waits
