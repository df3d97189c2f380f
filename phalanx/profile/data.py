"""What data is like: how many samples, how long they are, what padding wastes, and which sequence length wastes least.

A sample's length is the number of its tokens that are no padding. Data that is cut from one stream of tokens has no
padding at all; there any length will do.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.profile.store import FORMAT, Row, provenance

if TYPE_CHECKING:
    from phalanx.data.batches import Batches

KIND = "samples of a length"
LOOKED_AT = 512
MOST_ALIKE = 10**6  # samples of one length: a row with more is damaged
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


def to_rows(found: DataProfile, name: str, about: Mapping[str, str | int] | None = None) -> list[Row]:
    """As a profile is kept and written: how many samples have which length. about: what it depends on."""
    samples = -1 if found.samples is None else found.samples
    same: dict[str, str | int] = {
        **(about or {}), "data": name, "samples": samples, "tokens": found.tokens, "padded": int(found.has_padding),
        "looked_at": len(found.lengths),
    }  # fmt: skip
    counts, made = sorted(Counter(found.lengths).items()), provenance()
    return [Row(KIND, {**same, "size": length}, float(count), made) for length, count in counts]


def by_profile(rows: Sequence[Row]) -> list[list[Row]]:
    """Rows that are about data, of each profile by themselves."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        if row.kind == KIND:
            same = json.dumps({name: value for name, value in row.key.items() if name != "size"}, sort_keys=True)
            found.setdefault(same, []).append(row)
    return list(found.values())


def from_rows(rows: Sequence[Row]) -> DataProfile | None:
    """Of one profile. None where they say nothing of data, or not all."""
    own = [row for row in rows if row.kind == KIND]
    numbers = [[row.key.get(name) for name in ("size", "samples", "tokens", "padded")] for row in own]
    if not own or not all(isinstance(each, int) for row in numbers for each in row):
        return None
    if not all(1 <= row.value <= MOST_ALIKE for row in own):
        return None
    lengths = [int(row.key["size"]) for row in own for _ in range(int(row.value))]
    if min(lengths) < 1 or int(own[0].key["tokens"]) < 1:
        return None
    if own[0].key.get("looked_at", len(lengths)) != len(lengths):
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
