"""What one rank of a tensor-parallel group keeps of a logical tensor: some ranges of one dim, one after the other.

A fused projection is split by its sections, so a rank may keep several ranges of it; ranges of different ranks may be
of different sizes, or the same where a tensor cannot be split as far as there are ranks. Which rank keeps what is
decided elsewhere; here is where it lies.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from phalanx.state.layout import Box, boxes_of_range

if TYPE_CHECKING:
    from torch import Tensor

Range = tuple[int, int]  # from, up to but not including


@dataclass(frozen=True)
class Local:
    """`ranges` of dim `dim` of a tensor of this shape; all of it where there are none.

    The local tensor is the ranges joined along `dim`. Its elements, counted row by row, are what ranks divide further
    (ZeRO). A state shard describes the same elements box by box, and there each section comes as one box: row by row,
    fused columns would be as many boxes as they have rows. `packed` and `unpacked` go from one order to the other.
    """

    shape: tuple[int, ...]
    dim: int = 0
    ranges: tuple[Range, ...] = ()

    @cached_property
    def local_shape(self) -> tuple[int, ...]:
        if not self.ranges:
            return self.shape
        size = sum(stop - start for start, stop in self.ranges)
        return tuple(size if d == self.dim else other for d, other in enumerate(self.shape))

    @cached_property
    def numel(self) -> int:
        return math.prod(self.local_shape)

    @property
    def is_whole(self) -> bool:
        return self.local_shape == self.shape

    def boxes(self, start: int = 0, stop: int | None = None) -> tuple[Box, ...]:
        """Where the elements start … stop - 1 of the local tensor lie in the logical one, in the order of `packed`."""
        found = boxes_of_range(self.local_shape, start, self.numel if stop is None else stop)
        return found if not self.ranges else tuple(whole for box in found for _, whole in self._sections(box))

    def packed(self, elements: Tensor, start: int = 0) -> Tensor:
        """Elements of the local tensor from `start` on, flat, as the data of a state shard with their boxes."""
        if self._in_order:
            return elements
        data = elements.new_empty(elements.numel())
        for part, source in self._pairs(data, elements, start):
            part.copy_(source)
        return data

    def unpacked(self, data: Tensor, start: int = 0) -> Tensor:
        """The way back."""
        if self._in_order:
            return data
        elements = data.new_empty(data.numel())
        for source, part in self._pairs(data, elements, start):
            part.copy_(source)
        return elements

    @cached_property
    def _runs(self) -> tuple[Range, ...]:
        """The ranges, those that touch as one."""
        runs: list[Range] = []
        for start, stop in self.ranges:
            if runs and runs[-1][1] == start:
                runs[-1] = (runs[-1][0], stop)
            elif start < stop:
                runs.append((start, stop))
        return tuple(runs)

    @property
    def _in_order(self) -> bool:
        """Whether the elements of boxes, one after the other, are counted row by row."""
        return len(self._runs) <= 1 or math.prod(self.shape[: self.dim]) == 1

    def _sections(self, box: Box) -> Iterator[tuple[Box, Box]]:
        """The parts of a box of the local tensor that lie in one run each: in the box, and in the logical tensor."""
        low, high = box.offset[self.dim], box.end[self.dim]
        at = 0
        for start, stop in self._runs:
            begin, end = max(low, at), min(high, at + stop - start)
            if begin < end:
                shape = self._with(box.shape, end - begin)
                inside = Box(self._with((0,) * len(shape), begin - low), shape)
                yield inside, Box(self._with(box.offset, start + begin - at), shape)
            at += stop - start

    def _with(self, values: tuple[int, ...], value: int) -> tuple[int, ...]:
        return (*values[: self.dim], value, *values[self.dim + 1 :])

    def _pairs(self, data: Tensor, elements: Tensor, start: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The same section in packed data and among the elements in order."""
        at = 0
        for box in boxes_of_range(self.local_shape, start, start + elements.numel()):
            in_order, taken = elements[at : at + box.numel].view(box.shape), at
            for inside, _ in self._sections(box):
                yield data[taken : taken + inside.numel].view(inside.shape), in_order[inside.slices()]
                taken += inside.numel
            at += box.numel
