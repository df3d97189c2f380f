"""Tensors put together from parts of other, stored tensors, without reading them.

A model's parameter is often a stack, a concatenation or a slice of the tensors in its files. An `Assembly` says which
stored box lands where, so that reading one box of the parameter touches only the bytes it needs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING

from phalanx.state.layout import Box

if TYPE_CHECKING:
    from torch import Tensor

ReadStored = Callable[[str, Box], "Tensor"]


@dataclass(frozen=True)
class Piece:
    """The box `source` of the stored tensor `key` fills the box `target`; stored dim d lies along dim `dims[d]`.

    Dims of the target that no stored dim lies along have size 1 in this piece.
    """

    key: str
    source: Box
    target: Box
    dims: tuple[int, ...]

    def moved(self, dim: int, by: int) -> Piece:
        offset = tuple(o + by * (d == dim) for d, o in enumerate(self.target.offset))
        return replace(self, target=Box(offset, self.target.shape))

    def within(self, box: Box) -> Piece | None:
        """The part of this piece that lies in `box`, in the coordinates of `box`."""
        common = self.target.intersect(box)
        if common is None:
            return None
        inner = common.relative_to(self.target)
        offset = tuple(self.source.offset[d] + inner.offset[dim] for d, dim in enumerate(self.dims))
        shape = tuple(inner.shape[dim] for dim in self.dims)
        return Piece(self.key, Box(offset, shape), common.relative_to(box), self.dims)

    def read(self, read_stored: ReadStored) -> Tensor:
        """The values, shaped like the target."""
        stored = read_stored(self.key, self.source)
        order = sorted(range(len(self.dims)), key=lambda d: self.dims[d])
        return stored.permute(order).reshape(self.target.shape)


@dataclass(frozen=True)
class Assembly:
    """A tensor of this shape, made of pieces that cover it without overlap."""

    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @classmethod
    def stored(cls, key: str, shape: tuple[int, ...]) -> Assembly:
        """A stored tensor as it is."""
        box = Box.whole(shape)
        return cls(shape, (Piece(key, box, box, tuple(range(len(shape)))),))

    @property
    def keys(self) -> frozenset[str]:
        return frozenset(piece.key for piece in self.pieces)

    def part(self, box: Box) -> Assembly:
        """One box of this tensor, as a tensor."""
        found = (piece.within(box) for piece in self.pieces)
        return Assembly(box.shape, tuple(piece for piece in found if piece is not None))

    def transposed(self, dim0: int, dim1: int) -> Assembly:
        """With two dims swapped."""
        order = list(range(len(self.shape)))
        order[dim0], order[dim1] = order[dim1], order[dim0]

        def swap(values: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(values[d] for d in order)

        pieces = tuple(
            replace(p, target=Box(swap(p.target.offset), swap(p.target.shape)), dims=tuple(order[d] for d in p.dims))
            for p in self.pieces
        )
        return Assembly(swap(self.shape), pieces)

    def unsqueezed(self, dim: int) -> Assembly:
        """With a new dim of size 1 before `dim`."""

        def widen(values: tuple[int, ...], new: int) -> tuple[int, ...]:
            return (*values[:dim], new, *values[dim:])

        pieces = tuple(
            replace(
                p,
                target=Box(widen(p.target.offset, 0), widen(p.target.shape, 1)),
                dims=tuple(d + (d >= dim) for d in p.dims),
            )
            for p in self.pieces
        )
        return Assembly(widen(self.shape, 1), pieces)

    def read(self, read_stored: ReadStored) -> Tensor:
        """The values of the whole tensor."""
        if len(self.pieces) == 1:
            return self.pieces[0].read(read_stored)
        parts = [(piece.target, piece.read(read_stored)) for piece in self.pieces]
        if not parts:
            raise AssertionError(f"no piece covers a tensor of shape {self.shape}")
        result = parts[0][1].new_empty(self.shape)
        for target, values in parts:
            result[target.slices()] = values
        return result


def concatenated(parts: list[Assembly], dim: int) -> Assembly:
    """The parts one after the other along `dim`."""
    sizes = [part.shape[dim] for part in parts]
    starts = accumulate(sizes, initial=0)
    pieces = tuple(piece.moved(dim, start) for part, start in zip(parts, starts, strict=False) for piece in part.pieces)
    shape = tuple(sum(sizes) if d == dim else size for d, size in enumerate(parts[0].shape))
    return Assembly(shape, pieces)


def stacked(parts: list[Assembly], dim: int) -> Assembly:
    """The parts beside each other along a new dim."""
    return concatenated([part.unsqueezed(dim) for part in parts], dim)


def chunked(whole: Assembly, count: int, dim: int) -> list[Assembly]:
    """`count` parts along `dim`, all but the last of equal size, as torch.chunk does."""
    step = -(-whole.shape[dim] // count)
    boxes = []
    for start in range(0, whole.shape[dim], step):
        size = min(step, whole.shape[dim] - start)
        offset = tuple(start * (d == dim) for d in range(len(whole.shape)))
        boxes.append(Box(offset, tuple(size if d == dim else s for d, s in enumerate(whole.shape))))
    return [whole.part(box) for box in boxes]
