"""What each layer of a stage computes again: of all ways that fit into memory the one that takes least time.

Layers of a stage are taken to be alike (as they are on average), so that only counts matter: how many of them have
which row of a small table of options. Those that need most while they are at work come first, where least is kept:
no other order needs less.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import combinations_with_replacement
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]
SEVERAL = 4  # options; where there are more, so few layers have any but two of them
MOST_OPTIONS = 6  # of which layers of one stage are mixed
FEW = 3  # layers of a third and fourth option: two options in quantity are enough, the others fill gaps


class Option(NamedTuple):
    """A way to treat one layer. seconds: of a micro-batch; kept, working: bytes of one, without gradients that come in
    their place. state: bytes of parameters and what belongs to them, beyond those of a layer that is split over all
    tensor-parallel ranks; degrees: of its units, for each kind of layers, where that is not so."""

    rung: str
    seconds: float
    kept: float
    working: float
    state: float = 0.0
    degrees: tuple[tuple[int, ...], ...] = ()


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
    for option in sorted(options, key=lambda o: (o.seconds, o.kept, o.working, o.state)):
        if not any(_needs_less(other, option) for other in left):
            left.append(option)
    return sorted(left, key=lambda option: -option.working)


def _needs_less(one: Option, other: Option) -> bool:
    return one.kept <= other.kept and one.working <= other.working and one.state <= other.state


def worth_mixing(options: Sequence[Option], held: float, most: int) -> list[Option]:
    """Those that are nearest to the best mixes of two, where so many micro-batches are held at once."""
    left = undominated(options)
    if len(left) <= most:
        return left
    points = {option: (held * option.kept + option.state, option.seconds) for option in left}
    sizes, seconds = zip(*best_mixes(list(points.values())), strict=True)
    beyond = {option: took - np.interp(size, sizes, seconds) for option, (size, took) in points.items()}
    return undominated(sorted(left, key=lambda option: beyond[option])[:most])


Point = tuple[float, float]  # bytes and seconds


def best_mixes(points: Sequence[Point]) -> list[Point]:
    """Those that no mix of two others beats, by their bytes."""
    left: list[Point] = []
    for point in sorted(points):
        if left and point[1] >= left[-1][1]:
            continue
        while len(left) > 1 and _is_beaten(left[-2], left[-1], point):
            left.pop()
        left.append(point)
    return left


def _is_beaten(first: Point, middle: Point, last: Point) -> bool:
    """By a mix of the other two that needs as much."""
    share = (middle[0] - first[0]) / (last[0] - first[0])
    return middle[1] >= first[1] + share * (last[1] - first[1])


@lru_cache(maxsize=4096)
def counts(num_layers: int, num_options: int) -> NDArray[np.int64]:
    """[row, option]: ways to give each of so many layers an option; of at most two options more than a few."""
    if num_options == 1:
        return np.array([[num_layers]])
    if num_options > SEVERAL and num_layers <= FEW:
        each = np.array(list(combinations_with_replacement(range(num_options), num_layers)))
        return np.stack([(each == option).sum(axis=1) for option in range(num_options)], axis=1)
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
    most = num_layers if len(others) <= SEVERAL else min(num_layers, FEW)
    some = some[some.sum(axis=1) <= most]
    ways = num_layers - some.sum(axis=1) + 1
    rows = np.repeat(some, ways, axis=0)
    rows[:, i] = np.arange(len(rows)) - np.repeat(np.cumsum(ways) - ways, ways)
    rows[:, j] = num_layers - rows.sum(axis=1)
    return rows


class Mix(NamedTuple):
    """How many layers have which option, in the order in which they stand, and the seconds of all of them."""

    options: tuple[tuple[Option, int], ...]
    seconds: float


class _Table(NamedTuple):
    """Rows of counts, the quickest first. kept: bytes that a micro-batch keeps; peak: the most that layers of the one
    at work need, with what came before them; state: of parameters."""

    rows: NDArray[np.int64]
    kept: Numbers
    peak: Numbers
    state: Numbers


class Mixer:
    """Of one layer on one device: its options, and what so many such layers take at least."""

    def __init__(self, options: Sequence[Option]) -> None:
        self._options = undominated(options)
        names = ("seconds", "kept", "working", "state")
        self._seconds, self._kept, self._working, self._state = (
            np.array([getattr(option, name) for option in self._options]) for name in names
        )
        self.fastest = min(self._options, key=lambda option: option.seconds)
        self._tables: dict[int, _Table] = {}

    def best(self, num_layers: int, held: float, room: float, ends: Ends) -> Mix | None:
        """held: micro-batches whose activations are there at once. room: bytes for activations and what is at work.
        None where nothing fits."""
        quick = self._quick(num_layers, held, room, ends)
        if quick is not None or not num_layers:
            return quick
        table = self._table(num_layers)
        whole = ends.first_kept + table.kept + ends.last_kept
        peak = np.maximum(ends.first_kept + np.maximum(table.peak, ends.first_working), whole + ends.last_working)
        fits = (held - 1) * whole + peak + table.state <= room
        first = int(fits.argmax())  # the quickest are first
        return self._mix(table.rows[first]) if fits[first] else None

    def _quick(self, num_layers: int, held: float, room: float, ends: Ends) -> Mix | None:
        """All layers with the fastest option, where that fits: nothing is faster."""
        option = self.fastest
        kept = ends.first_kept + num_layers * option.kept
        whole, most = kept + ends.last_kept, max(kept, ends.first_kept + option.kept) if num_layers else kept
        peak = max(ends.first_kept + ends.first_working, most + (option.working if num_layers else 0.0),
                   whole + ends.last_working)  # fmt: skip
        if (held - 1) * whole + peak + num_layers * option.state > room:
            return None
        return Mix(((option, num_layers),) if num_layers else (), num_layers * option.seconds)

    def _table(self, num_layers: int) -> _Table:
        if num_layers not in self._tables:
            rows = counts(num_layers, len(self._options))
            rows = rows[np.argsort(rows @ self._seconds, kind="stable")]
            kept: Numbers = np.cumsum(rows * self._kept, axis=1, dtype=np.float64)
            first = kept - (rows - 1) * self._kept  # where a layer frees less than it leaves, its first needs most
            peak = np.where(rows > 0, np.maximum(kept, first) + self._working, 0.0).max(axis=1)
            self._tables[num_layers] = _Table(rows, kept[:, -1], peak, (rows * self._state).sum(axis=1))
        return self._tables[num_layers]

    def _mix(self, row: NDArray[np.int64]) -> Mix:
        pairs = tuple((option, int(n)) for option, n in zip(self._options, row, strict=True) if n)
        return Mix(pairs, float(row @ self._seconds))
