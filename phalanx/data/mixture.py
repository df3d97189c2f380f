"""Several sources of data in fixed shares: which source a stream position belongs to, and which of its samples it is.

A pure function of the position: the shares as fractions repeat after as many positions as their common denominator, and
within such a round every source has exactly its share, spread evenly. So any position can be asked for, and a run that
goes on continues every source where it was. Each source has its own order, drawn from the seed, and begins again when
all of it was seen.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from phalanx.data.sources import is_dataset
from phalanx.errors import DataError

_MOST_POSITIONS = 100_000  # of a round
_WEIGHTED = re.compile(r"(.+):(\d+(?:\.\d*)?|\.\d+)")

Positions = NDArray[np.int64]


def split_weight(item: str) -> tuple[str, str | None]:
    """'a.txt:0.3' → ('a.txt', '0.3'). A file of that name, and synthetic:1000, have no weight."""
    match = _WEIGHTED.fullmatch(item)
    if match is None or match[1] == "synthetic" or Path(item).expanduser().exists():
        return item, None
    return match[1], match[2]


def weighted_sources(data: Any) -> list[tuple[Any, Fraction]] | None:
    """Sources with their shares, which add up to 1; None where the data is one source, or several without weights."""
    if isinstance(data, Mapping) and data and not is_dataset(data):
        given = [(source, str(weight)) for source, weight in cast(Mapping[Any, Any], data).items()]
    else:
        items = [data] if isinstance(data, str | Path) else data
        if not isinstance(items, list | tuple) or not all(isinstance(item, str | Path) for item in items):
            return None
        found = [split_weight(str(item)) for item in items]
        if all(weight is None for _, weight in found):
            return None
        _require_all(found)
        given = [(source, str(weight)) for source, weight in found]
    weights = [_weight(source, text) for source, text in given]
    return [(source, weight / sum(weights)) for (source, _), weight in zip(given, weights)]


def _require_all(found: Sequence[tuple[str, str | None]]) -> None:
    without = [source for source, weight in found if weight is None]
    if without:
        weighted = next(f"{source}:{weight}" for source, weight in found if weight is not None)
        raise DataError(
            f"data {weighted!r} has a weight, but {without[0]!r} has none",
            f"give every source its weight, e.g. {without[0]}:0.5; or none, and they are joined",
        )


def _weight(source: Any, text: str) -> Fraction:
    try:
        weight = Fraction(text)
    except ValueError:
        weight = Fraction(0)
    if weight <= 0:
        raise DataError(f"the weight of data {str(source)!r} is {text}", "give it a number above 0, e.g. 0.3")
    return weight


class Mixture:
    """Positions of a stream ↔ positions of its sources. shares: of every source, adding up to 1."""

    def __init__(self, shares: Sequence[Fraction]) -> None:
        assert sum(shares) == 1, shares
        self.round = int(np.lcm.reduce([share.denominator for share in shares]))
        if self.round > _MOST_POSITIONS:
            raise DataError(
                f"the weights of the data repeat only after {self.round:,} samples, more than {_MOST_POSITIONS:,}",
                "write them with fewer digits",
            )
        self.counts = np.array([int(share * self.round) for share in shares], np.int64)
        self._sources, self._places = _spread(self.counts)

    def at(self, positions: Positions) -> tuple[Positions, Positions]:
        """Of which source each position is, and which position of that source."""
        rounds, places = np.divmod(positions, self.round)
        sources = self._sources[places]
        return sources, rounds * self.counts[sources] + self._places[places]


def _spread(counts: Positions) -> tuple[Positions, Positions]:
    """The sources of one round, each evenly over it; and the how-manieth of its source each position is."""
    sources = np.repeat(np.arange(len(counts)), counts)
    places = np.concatenate([np.arange(count) for count in counts])
    order = np.lexsort((sources, (places + 0.5) / counts[sources]))
    return sources[order], places[order]
