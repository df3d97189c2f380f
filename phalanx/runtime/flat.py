"""Tensors laid side by side in one buffer, and how that buffer is divided into equal shards. Arithmetic only.

One buffer per bucket makes a gather or a reduction one message without any copying, and lets a shard begin anywhere:
it is a range of elements, not of rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

ALIGNMENT = 64  # elements: every tensor starts where vectorised kernels like it


@dataclass(frozen=True)
class Place:
    """A tensor's elements are [start, stop) of the buffer."""

    name: str
    shape: tuple[int, ...]
    start: int

    @property
    def stop(self) -> int:
        return self.start + math.prod(self.shape)


@dataclass(frozen=True)
class Piece:
    """The elements [start, stop) of a tensor (counted row by row) that lie in one shard."""

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def is_whole(self) -> bool:
        return self.start == 0 and self.stop == math.prod(self.shape)


@dataclass(frozen=True)
class FlatLayout:
    """Where each tensor lies in a buffer of `size` elements, which divides into `shards` equal parts."""

    places: tuple[Place, ...]
    shards: int

    @classmethod
    def of(cls, shapes: Mapping[str, tuple[int, ...]], shards: int) -> FlatLayout:
        places: list[Place] = []
        end = 0
        for name, shape in shapes.items():
            places.append(Place(name, tuple(shape), _round_up(end, ALIGNMENT)))
            end = places[-1].stop
        return cls(tuple(places), shards)

    @cached_property
    def size(self) -> int:
        """Padded, so that shards are equal and aligned."""
        end = self.places[-1].stop if self.places else 0
        return _round_up(end, self.shards * ALIGNMENT)

    @property
    def shard_size(self) -> int:
        return self.size // self.shards

    def pieces(self, shard: int) -> tuple[tuple[Piece, int], ...]:
        """What shard number `shard` holds of each tensor, and where in the shard that begins."""
        begin, end = shard * self.shard_size, (shard + 1) * self.shard_size
        found: list[tuple[Piece, int]] = []
        for place in self.places:
            start, stop = max(begin, place.start), min(end, place.stop)
            if start < stop:
                piece = Piece(place.name, place.shape, start - place.start, stop - place.start)
                found.append((piece, start - begin))
        return tuple(found)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
