"""Activations re-placed between the ranks that split tensors, and their gradients on the way back: by a collective, or
by what this rank can do alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as functional
from torch import Tensor

from phalanx.comm.links import Group
from phalanx.expressions import evaluate
from phalanx.model.shard.sharded import BACKWARD, FORWARD, Redistribution

Dims = Mapping[str, int]


class Awaited(Protocol):
    """Something that was started."""

    def wait(self, what: str = "") -> None: ...


@dataclass(frozen=True)
class Arriving:
    """Something on its way: what is made of it when it is here."""

    pending: Awaited
    finish: Callable[[], object]

    def wait(self, what: str) -> object:
        self.pending.wait(what)
        return self.finish()


class Mover:
    """The redistributions over one group, by kind."""

    def __init__(self, group: Group) -> None:
        self._group, self._count = group, len(group.ranks)
        self.moved_bytes = 0  # of the whole tensors of all collectives so far

    def forward(self, redistribution: Redistribution, dims: Dims) -> Callable[[Tensor], Tensor | Arriving]:
        if redistribution.kind in FORWARD:
            return self._collective(FORWARD[redistribution.kind], redistribution, dims)
        assert redistribution.kind == "shard", f"{redistribution.kind} does nothing in the forward"
        return lambda value: self._own_part(value, redistribution)

    def backward(self, redistribution: Redistribution, dims: Dims) -> Callable[[Tensor], Tensor | Arriving]:
        if redistribution.kind in BACKWARD:
            return self._collective(BACKWARD[redistribution.kind], redistribution, dims)
        match redistribution.kind:
            case "unshard":
                return lambda gradient: self._own_part(gradient, redistribution)
            case "stack":
                return lambda gradient: gradient[self._group.index].clone()
            case _:
                assert redistribution.kind == "scale", f"{redistribution.kind} does nothing in the backward"
                return lambda gradient: gradient * redistribution.factor

    def _collective(self, name: str, redistribution: Redistribution, dims: Dims) -> Callable[[Tensor], Arriving]:
        match name:
            case "all_reduce":
                return self._sum
            case "reduce_scatter":
                return lambda value: self._scatter(value, redistribution)
            case _:
                return lambda value: self._gather(value, redistribution, dims)

    def _sum(self, value: Tensor) -> Arriving:
        total = value.clone(memory_format=torch.contiguous_format)  # others may still read what is summed
        self.moved_bytes += total.nbytes
        return Arriving(self._group.all_reduce(total), lambda: total)

    def _scatter(self, value: Tensor, redistribution: Redistribution) -> Arriving:
        parts = self._parts(value, redistribution.dim)
        own = parts.new_empty(parts.shape[1:])
        self.moved_bytes += parts.nbytes
        return Arriving(self._group.reduce_scatter(own, parts), lambda: own)

    def _gather(self, value: Tensor, redistribution: Redistribution, dims: Dims) -> Arriving:
        value, dim = value.contiguous(), redistribution.dim
        found = value.new_empty(self._count, *value.shape)
        pending = self._group.all_gather(found, value)
        self.moved_bytes += found.nbytes
        if redistribution.kind == "stack":
            return Arriving(pending, lambda: found)
        size = evaluate(redistribution.size, dims) if redistribution.size else self._count * value.shape[dim]
        return Arriving(pending, lambda: _joined(found, dim, size))

    def _own_part(self, value: Tensor, redistribution: Redistribution) -> Tensor:
        # A copy: a part of them all would keep them all.
        return self._parts(value, redistribution.dim)[self._group.index].clone()

    def _parts(self, value: Tensor, dim: int) -> Tensor:
        """[parts, …]: equal parts along a dim, the last ones padded with zeros."""
        length = -(-value.shape[dim] // self._count)
        missing = length * self._count - value.shape[dim]
        if missing:
            value = functional.pad(value, [0, 0] * (value.dim() - 1 - dim) + [0, missing])
        divided = value.reshape(*value.shape[:dim], self._count, length, *value.shape[dim + 1 :])
        return divided.movedim(dim, 0).contiguous()


def _joined(parts: Tensor, dim: int, size: int) -> Tensor:
    """Parts one after the other along a dim, without the padding at its end."""
    moved = parts.movedim(0, dim)
    whole = moved.reshape(*moved.shape[:dim], -1, *moved.shape[dim + 2 :])
    return whole.narrow(dim, 0, size).contiguous()
