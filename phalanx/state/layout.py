"""Boxes: axis-aligned parts of a named tensor, the currency of everything that moves state.

A box says which elements, never where they live or what they are worth. Pure arithmetic on tuples; no torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Box:
    """The elements `offset[d] <= index[d] < offset[d] + shape[d]` of a tensor. A scalar's box has no dims."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        assert len(self.offset) == len(self.shape), f"offset {self.offset} and shape {self.shape} differ in dims"
        assert all(size >= 0 for size in self.offset + self.shape), f"negative size in {self}"

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Box:
        """The box that holds a whole tensor of this shape."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def end(self) -> tuple[int, ...]:
        return tuple(o + s for o, s in zip(self.offset, self.shape, strict=True))

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
        offset = tuple(map(max, self.offset, other.offset))
        shape = tuple(min(a, b) - o for a, b, o in zip(self.end, other.end, offset, strict=True))
        return Box(offset, shape) if all(size > 0 for size in shape) else None

    def relative_to(self, other: Box) -> Box:
        """This box in the coordinates of `other`, which must not start after it in any dim."""
        return Box(tuple(a - b for a, b in zip(self.offset, other.offset, strict=True)), self.shape)
