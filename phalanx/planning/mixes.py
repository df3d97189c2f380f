"""What each layer of a stage computes again: of all ways that fit into memory the one that takes least time.

Layers of a stage are taken to be alike (as they are on average), so that only counts matter: how many of them have
which row of a small table of options. Those that need most while they are at work come first, where least is kept:
no other order needs less.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]
FEW = 3  # layers of a third and fourth option: two options in quantity are enough, the others fill gaps


class Option(NamedTuple):
    """A way to treat one layer. seconds: of a micro-batch; kept, working: bytes of one. An offload is one more row."""

    rung: str
    seconds: float
    kept: float
    working: float


class Ends(NamedTuple):
    """What a stage has beside its layers. first: kept and working bytes of what comes before them; last: of what
    comes after. A stage without has zeros."""

    first_kept: float = 0.0
    first_working: float = 0.0
    last_kept: float = 0.0
    last_working: float = 0.0


def undominated(options: Sequence[Option]) -> list[Option]:
    """Without those that another one beats in time and in bytes; those that need most at work first."""
    left: list[Option] = []
    for option in sorted(options, key=lambda o: (o.seconds, o.kept, o.working)):
        if not any(other.kept <= option.kept and other.working <= option.working for other in left):
            left.append(option)
    return sorted(left, key=lambda option: -option.working)


@lru_cache(maxsize=4096)
def counts(num_layers: int, num_options: int) -> NDArray[np.int64]:
    """[row, option]: ways to give each of so many layers an option; of at most two options more than a few."""
    if num_options == 1:
        return np.array([[num_layers]])
    few = np.arange(min(FEW, num_layers) + 1)
    rows = np.concatenate([
        _two_of(num_layers, [few if place not in (i, j) else few[:1] for place in range(num_options)], i, j)
        for i in range(num_options) for j in range(i)
    ])  # fmt: skip
    codes = rows @ (num_layers + 1) ** np.arange(num_options)[::-1]
    return rows[np.unique(codes, return_index=True)[1]]


def _two_of(num_layers: int, others: Sequence[NDArray[np.int64]], i: int, j: int) -> NDArray[np.int64]:
    """Every way in which two options share what all ways of `others` leave of the layers."""
    some = np.stack(np.meshgrid(*others, indexing="ij"), axis=-1).reshape(-1, len(others))
    some = some[some.sum(axis=1) <= num_layers]
    ways = num_layers - some.sum(axis=1) + 1
    rows = np.repeat(some, ways, axis=0)
    rows[:, i] = np.arange(len(rows)) - np.repeat(np.cumsum(ways) - ways, ways)
    rows[:, j] = num_layers - rows.sum(axis=1)
    return rows


class Mix(NamedTuple):
    """How many layers have which rung, in the order in which they stand, and the seconds of all of them."""

    rungs: tuple[tuple[str, int], ...]
    seconds: float


class Mixer:
    """Of one layer on one device: its options, and what so many such layers take at least."""

    def __init__(self, options: Sequence[Option]) -> None:
        self._options = undominated(options)
        self._seconds, self._kept, self._working = (
            np.array([getattr(option, name) for option in self._options]) for name in ("seconds", "kept", "working")
        )
        self.fastest = min(self._options, key=lambda option: option.seconds)
        self._rows: dict[tuple[int, Ends], tuple[NDArray[np.int64], Numbers, Numbers]] = {}

    def best(self, num_layers: int, held: float, room: float, ends: Ends) -> Mix | None:
        """held: micro-batches whose activations are there at once. room: bytes for activations and what is at work.
        None where nothing fits."""
        quick = self._quick(num_layers, held, room, ends)
        if quick is not None or not num_layers:
            return quick
        rows, kept, peak = self._table(num_layers, ends)
        fits = (held - 1) * kept + peak <= room
        first = int(fits.argmax())  # the quickest are first
        return self._mix(rows[first]) if fits[first] else None

    def _quick(self, num_layers: int, held: float, room: float, ends: Ends) -> Mix | None:
        """All layers with the fastest option, where that fits: nothing is faster."""
        option = self.fastest
        kept = ends.first_kept + num_layers * option.kept
        whole = kept + ends.last_kept
        peak = max(ends.first_kept + ends.first_working, kept + (option.working if num_layers else 0.0),
                   whole + ends.last_working)  # fmt: skip
        if (held - 1) * whole + peak > room:
            return None
        return Mix(((option.rung, num_layers),) if num_layers else (), num_layers * option.seconds)

    def _table(self, num_layers: int, ends: Ends) -> tuple[NDArray[np.int64], Numbers, Numbers]:
        """Rows of counts, the quickest first, with the bytes that a micro-batch keeps and the most that the one at work
        needs."""
        key = (num_layers, ends)
        if key not in self._rows:
            rows = counts(num_layers, len(self._options))
            kept: Numbers = ends.first_kept + np.cumsum(rows * self._kept, axis=1, dtype=np.float64)
            moments = np.where(rows > 0, kept + self._working, 0.0).max(axis=1)
            whole = kept[:, -1] + ends.last_kept
            peak = np.maximum(np.maximum(moments, ends.first_kept + ends.first_working), whole + ends.last_working)
            order = np.argsort(rows @ self._seconds, kind="stable")
            self._rows[key] = (rows[order], whole[order], peak[order])
        return self._rows[key]

    def _mix(self, row: NDArray[np.int64]) -> Mix:
        pairs = tuple((option.rung, int(n)) for option, n in zip(self._options, row, strict=True) if n)
        return Mix(pairs, float(row @ self._seconds))
