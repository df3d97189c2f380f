"""What data is like: how many samples, how long they are, what padding wastes, and which sequence length wastes least.

A sample's length is the number of its tokens that are no padding. Data that is cut from one stream of tokens has no
padding at all; there any length will do.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.profile.store import FORMAT, Row, provenance

if TYPE_CHECKING:
    from phalanx.data.batches import Batches

KIND = "samples of a length"
LOOKED_AT = 512
STEPS = 8  # lengths that are tried, up to the longest
MULTIPLE = 8  # of tokens: devices are slow with other lengths


@dataclass(frozen=True)
class Length:
    """A sequence length: of all tokens that are computed the share that is padding, and of all that are there the share
    that is cut off."""

    tokens: int
    padding: float
    cut: float

    @property
    def waste(self) -> float:
        return self.padding + self.cut


@dataclass(frozen=True)
class DataProfile:
    """lengths: of the samples that were looked at, in rising order. tokens: that a sample takes now."""

    samples: int | None
    lengths: tuple[int, ...]
    tokens: int
    has_padding: bool

    @property
    def mean(self) -> float:
        return sum(self.lengths) / len(self.lengths)

    def share(self, part: float) -> int:
        """The length that so large a part of the samples does not exceed."""
        return self.lengths[min(len(self.lengths) - 1, math.ceil(part * len(self.lengths)) - 1)]

    @property
    def now(self) -> Length:
        return length_of(self.lengths, self.tokens)

    @property
    def best(self) -> Length:
        """The one with the least waste; of equals the longest."""
        return min(self.tried(), key=lambda own: (own.waste, -own.tokens))

    def tried(self) -> list[Length]:
        longest = self.lengths[-1]
        shown = {-(-longest * step // STEPS // MULTIPLE) * MULTIPLE for step in range(1, STEPS + 1)}
        return [length_of(self.lengths, tokens) for tokens in sorted(shown)]


def length_of(lengths: Sequence[int], tokens: int) -> Length:
    kept = sum(min(length, tokens) for length in lengths)
    return Length(tokens, 1 - kept / (tokens * len(lengths)), 1 - kept / sum(lengths))


def profile_data(batches: Batches, most: int = LOOKED_AT) -> DataProfile:
    """Of the first samples in the order of the run."""
    count = min(most, batches.num_samples or most)
    batch = batches.batch(0, count)
    mask = batch.get("attention_mask")
    first = next(iter(batch.values()))
    tokens = int(first.shape[1]) if first.dim() > 1 else 1
    lengths = [int(own.sum()) for own in mask] if mask is not None else [tokens] * count
    return DataProfile(batches.num_samples, tuple(sorted(max(1, own) for own in lengths)), tokens, mask is not None)


def to_rows(found: DataProfile, name: str) -> list[Row]:
    """As a profile is written: how many samples have which length."""
    about = {"data": name, "samples": -1 if found.samples is None else found.samples, "tokens": found.tokens}
    about["padded"] = int(found.has_padding)
    counts = sorted(Counter(found.lengths).items())
    return [Row(KIND, {**about, "size": length}, float(count), provenance()) for length, count in counts]


def from_rows(rows: Sequence[Row]) -> DataProfile | None:
    """None where they say nothing of data."""
    own = [row for row in rows if row.kind == KIND]
    numbers = [[row.key.get(name) for name in ("size", "samples", "tokens", "padded")] for row in own]
    if not own or not all(isinstance(each, int) for row in numbers for each in row):
        return None
    lengths = [int(row.key["size"]) for row in own for _ in range(int(row.value))]
    if not lengths or min(lengths) < 1 or int(own[0].key["tokens"]) < 1:
        return None
    samples = int(own[0].key["samples"])
    return DataProfile(
        None if samples < 0 else samples, tuple(sorted(lengths)), int(own[0].key["tokens"]), bool(own[0].key["padded"])
    )


def is_profile(path: Path) -> bool:
    """Whether a file begins as `phalanx profile --out` writes it; data may be JSON, too."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return f'"format": "{FORMAT}"' in file.read(200)
    except OSError:
        return False
