"""Tensors laid side by side in one buffer, and how that buffer is divided into equal shards. Arithmetic only.

One buffer per bucket makes a gather or a reduction one message without any copying, and lets a shard begin anywhere:
it is a range of elements, not of rows. The tensors are what a rank keeps of the model's (`state/local.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

from phalanx.state.layout import Box, take_boxes
from phalanx.state.local import Local

if TYPE_CHECKING:
    from torch import Tensor

ALIGNMENT = 64  # elements: every tensor starts where vectorised kernels like it


class Source(Protocol):
    """Where boxes of logical tensors can be read: a checkpoint, a model's weights."""

    def read_flat(self, name: str, boxes: Sequence[Box]) -> Tensor: ...


@dataclass(frozen=True)
class Sharding:
    """How this rank's buckets are divided: `index` of `shards` parts; `whole`: all values are kept all the same."""

    shards: int = 1
    index: int = 0
    whole: bool = True


@dataclass(frozen=True)
class Place:
    """A tensor's elements are [start, stop) of the buffer."""

    name: str
    local: Local
    start: int

    @property
    def shape(self) -> tuple[int, ...]:
        return self.local.local_shape

    @property
    def stop(self) -> int:
        return self.start + self.local.numel


@dataclass(frozen=True)
class Piece:
    """The elements [start, stop) of what this rank keeps of a tensor, counted row by row, that lie in one shard."""

    name: str
    local: Local
    start: int
    stop: int

    @classmethod
    def whole(cls, name: str, local: Local) -> Piece:
        """All that this rank keeps."""
        return cls(name, local, 0, local.numel)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the tensor that this is a piece of, as far as this rank keeps it."""
        return self.local.local_shape

    @property
    def is_whole(self) -> bool:
        """Whether it is all that this rank keeps."""
        return self.start == 0 and self.stop == self.local.numel

    def boxes(self) -> tuple[Box, ...]:
        """Where its elements lie in the logical tensor, as boxes of a state shard."""
        return self.local.boxes(self.start, self.stop)

    def packed(self, elements: Tensor) -> Tensor:
        """Its elements as the data of a state shard with its boxes."""
        return self.local.packed(elements.reshape(-1), self.start)

    def unpacked(self, data: Tensor) -> Tensor:
        """Its elements from the data of a state shard."""
        return self.local.unpacked(data, self.start)

    def read(self, source: Source, key: str) -> Tensor:
        """Its elements, from where only its boxes are read."""
        return self.unpacked(source.read_flat(key, self.boxes()))

    def of(self, tensor: Tensor) -> Tensor:
        """Its elements, from the whole logical tensor."""
        return self.unpacked(take_boxes(tensor, self.boxes()))

    def shaped(self, elements: Tensor) -> Tensor:
        """In the shape of what this rank keeps if that is all of it, else as a row of elements."""
        return elements.view(self.shape) if self.is_whole else elements


@dataclass(frozen=True)
class FlatLayout:
    """Where each tensor lies in a buffer of `size` elements, which divides into `shards` equal parts."""

    places: tuple[Place, ...]
    shards: int

    @classmethod
    def of(cls, tensors: Mapping[str, Local], shards: int) -> FlatLayout:
        places: list[Place] = []
        end = 0
        for name, local in tensors.items():
            places.append(Place(name, local, _round_up(end, ALIGNMENT)))
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
        for place, first, last in self._spans:
            if first < end and begin < last:
                start, stop = max(begin, first), min(end, last)
                found.append((Piece(place.name, place.local, start - first, stop - first), start - begin))
        return tuple(found)

    @cached_property
    def _spans(self) -> tuple[tuple[Place, int, int], ...]:
        """Of places that have elements: many shards look for theirs."""
        return tuple((place, place.start, place.stop) for place in self.places if place.start < place.stop)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
