"""Which elements of which named tensors lie on which rank: boxes, state shards and layouts.

A box is an axis-aligned part of a tensor; a state shard is what one rank has of one tensor; a layout is what all ranks
have. Values and where they come from are not known here. Pure arithmetic on tuples; no torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import add
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Box:
    """The elements `offset[d] <= index[d] < offset[d] + shape[d]` of a tensor. A scalar's box has no dims."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        assert len(self.offset) == len(self.shape), f"offset {self.offset} and shape {self.shape} differ in dims"
        assert min(self.offset + self.shape, default=0) >= 0, f"negative size in {self}"

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Box:
        """The box that holds a whole tensor of this shape."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def end(self) -> tuple[int, ...]:
        return tuple(map(add, self.offset, self.shape))

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def slices(self) -> tuple[slice, ...]:
        """What to index a tensor with to get this box."""
        return tuple(slice(o, e) for o, e in zip(self.offset, self.end, strict=True))

    def contains(self, other: Box) -> bool:
        return all(a <= b and d <= c for a, b, c, d in zip(self.offset, other.offset, self.end, other.end, strict=True))

    def intersect(self, other: Box) -> Box | None:
        """The elements in both boxes; None when there are none."""
        offset: list[int] = []
        shape: list[int] = []
        # Layouts have many boxes: a plain loop is the quickest.
        for mine, size, theirs, other_size in zip(self.offset, self.shape, other.offset, other.shape, strict=True):
            begin = mine if mine > theirs else theirs
            left = min(mine + size, theirs + other_size) - begin
            if left <= 0:
                return None
            offset.append(begin)
            shape.append(left)
        common = tuple(shape)
        if common == self.shape:  # most often one box contains the other, which is then the common one
            return self
        return other if common == other.shape else Box(tuple(offset), common)

    def relative_to(self, other: Box) -> Box:
        """This box in the coordinates of `other`, which must not start after it in any dim."""
        return Box(tuple(a - b for a, b in zip(self.offset, other.offset, strict=True)), self.shape)

    def without(self, other: Box) -> tuple[Box, ...]:
        """The elements that are not in `other`, as disjoint boxes."""
        common = self.intersect(other)
        if common is None:
            return (self,) if self.numel else ()
        parts: list[Box] = []
        offset, end = list(self.offset), list(self.end)
        for dim in range(len(self.shape)):
            for low, high in ((offset[dim], common.offset[dim]), (common.end[dim], end[dim])):
                if low < high:
                    spans = [(low, high) if d == dim else (offset[d], end[d]) for d in range(len(self.shape))]
                    parts.append(Box(tuple(a for a, _ in spans), tuple(b - a for a, b in spans)))
            offset[dim], end[dim] = common.offset[dim], common.end[dim]
        return tuple(parts)


def boxes_of_range(shape: tuple[int, ...], start: int, stop: int) -> tuple[Box, ...]:
    """The elements start … stop - 1 of a tensor counted row by row, as boxes in that order (at most 2 · dims - 1)."""
    assert 0 <= start <= stop <= math.prod(shape), f"{start}:{stop} is not a range of a tensor of shape {shape}"
    if start == stop:
        return ()
    if len(shape) <= 1:
        return (Box((start,) * len(shape), (stop - start,) * len(shape)),)
    rest, row = shape[1:], math.prod(shape[1:])
    first_full, end_full = -(-start // row), stop // row
    if first_full > end_full:
        return _in_row(rest, end_full, start - end_full * row, stop - end_full * row)
    middle = Box((first_full, *(0 for _ in rest)), (end_full - first_full, *rest))
    return (
        *(_in_row(rest, first_full - 1, start % row, row) if start % row else ()),
        *((middle,) if middle.numel else ()),
        *_in_row(rest, end_full, 0, stop % row),
    )


def _in_row(rest: tuple[int, ...], index: int, start: int, stop: int) -> tuple[Box, ...]:
    if len(rest) == 1:  # of a matrix, which most tensors are
        return (Box((index, start), (1, stop - start)),) if start < stop else ()
    return tuple(Box((index, *box.offset), (1, *box.shape)) for box in boxes_of_range(rest, start, stop))


@dataclass(frozen=True)
class StateShard:
    """What one rank holds of one logical tensor of this shape: the elements of `boxes`, which are disjoint.

    Its data is a flat tensor: the boxes in order, each row by row. Owners are counted once (norms, saving); what is not
    owned is a replica of what some other rank owns. The dtype is named as torch names it, for example `bfloat16`.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    boxes: tuple[Box, ...]
    owned: bool = True

    @property
    def numel(self) -> int:
        return sum(box.numel for box in self.boxes)

    def places(self) -> tuple[tuple[Box, int], ...]:
        """Each box with where its elements begin in the data."""
        return placed(self.boxes)


def placed(boxes: Sequence[Box]) -> tuple[tuple[Box, int], ...]:
    """Each box with where its elements begin in flat data that holds them all."""
    return tuple(zip(boxes, accumulate((box.numel for box in boxes), initial=0), strict=False))


def take_boxes(tensor: Tensor, boxes: Sequence[Box]) -> Tensor:
    """The elements of boxes of a whole tensor, one after the other, each row by row: the data of a state shard."""
    import torch

    parts = [tensor[box.slices()].reshape(-1) for box in boxes]
    return parts[0] if len(parts) == 1 else torch.cat([tensor.new_empty(0), *parts])


Layout = Mapping[int, Sequence[StateShard]]
"""What each rank holds, by rank; a name at most once per rank."""


def whole(name: str, tensor: Tensor) -> tuple[StateShard, Tensor]:
    """A tensor that this rank owns all of, as a state shard and its data."""
    shape = tuple(tensor.shape)
    dtype = str(tensor.dtype).removeprefix("torch.")
    return StateShard(name, shape, dtype, (Box.whole(shape),)), tensor.detach().reshape(-1)


def check_tiles(name: str, shape: tuple[int, ...], boxes: Sequence[Box]) -> None:
    """Asserts that the boxes cover a tensor exactly once."""
    check_inside(name, shape, boxes)
    check_disjoint(name, boxes)
    held, needed = sum(box.numel for box in boxes), math.prod(shape)
    assert held == needed, f"owners hold {held} of the {needed} elements of {name}"


def check_inside(name: str, shape: tuple[int, ...], boxes: Iterable[Box]) -> None:
    outside = [box for box in boxes if not Box.whole(shape).contains(box)]
    assert not outside, f"{outside} lie outside {name} of shape {shape}"


def check_disjoint(name: str, boxes: Iterable[Box]) -> None:
    """Sweeps along the first dim, so that many row ranges cost little."""
    reached: list[Box] = []
    for box in sorted((box for box in boxes if box.numel), key=lambda box: box.offset):
        reached = [other for other in reached if other.end[:1] > box.offset[:1] or not box.shape]
        twice = next((other for other in reached if other.intersect(box)), None)
        assert twice is None, f"{name} is held twice where {twice} and {box} overlap"
        reached.append(box)
