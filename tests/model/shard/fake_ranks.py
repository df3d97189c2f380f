"""Ranks of one process that send tensors in lockstep: every rank starts its collective, then all of them wait."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from phalanx.engine.redistribute import Arriving, Mover
from phalanx.model.shard.sharded import BACKWARD, FORWARD, LOCAL_BACKWARD, LOCAL_FORWARD, Move, Redistribution
from phalanx.program.shape import Partition


@dataclass
class _Cell:
    """What the ranks of one group have given so far."""

    given: dict[int, Tensor] = field(default_factory=dict)

    def everything(self, count: int) -> Tensor:
        assert len(self.given) == count, "a rank did not take part"
        return torch.stack([self.given[index] for index in sorted(self.given)])


@dataclass
class _Pending:
    finish: Callable[[], object]

    def wait(self, what: str) -> None:
        self.finish()


@dataclass
class _Group:
    ranks: tuple[int, ...]
    index: int
    cell: _Cell

    def all_reduce(self, tensor: Tensor) -> _Pending:
        return self._give(tensor, lambda all_given: tensor.copy_(all_given.sum(0)))

    def all_gather(self, output: Tensor, input: Tensor) -> _Pending:
        return self._give(input, lambda all_given: output.copy_(all_given))

    def reduce_scatter(self, output: Tensor, input: Tensor) -> _Pending:
        return self._give(input, lambda all_given: output.copy_(all_given.sum(0)[self.index]))

    def _give(self, tensor: Tensor, finish: Callable[[Tensor], object]) -> _Pending:
        self.cell.given[self.index] = tensor.clone()
        return _Pending(lambda: finish(self.cell.everything(len(self.ranks))))


def carry_out(moves: Sequence[Move], values: list[Tensor], dims: dict[str, int]) -> list[Tensor]:
    """The values of all ranks after the moves' forwards."""
    for move in moves:
        values = _one(move, values, dims, "forward")
    return values


def carry_back(moves: Sequence[Move], gradients: list[Tensor], dims: dict[str, int]) -> list[Tensor]:
    for move in reversed(moves):
        gradients = _one(move, gradients, dims, "backward")
    return gradients


def _one(move: Move, values: list[Tensor], dims: dict[str, int], way: str) -> list[Tensor]:
    size = "tokens" if move.dim == 1 and move.kind in ("reduce_scatter", "all_gather", "unshard", "shard") else ""
    redistribution = Redistribution(move.kind, "source", "target", move.cells, move.dim, size, move.factor)
    return redistributed(redistribution, values, dims, way)


def redistributed(redistribution: Redistribution, values: list[Tensor], dims: dict[str, int], way: str) -> list[Tensor]:
    """The values of all ranks after the forward or backward of a redistribution."""
    movers = _movers(redistribution.cells, len(values))
    happens = {"forward": FORWARD | LOCAL_FORWARD, "backward": BACKWARD | LOCAL_BACKWARD}[way]
    if redistribution.kind not in happens:
        return values
    carry = {"forward": Mover.forward, "backward": Mover.backward}[way]
    found: list[Any] = [carry(mover, redistribution, dims)(value) for mover, value in zip(movers, values, strict=True)]
    return [one.wait("") if isinstance(one, Arriving) else one for one in found]


def _movers(cells: Partition, tp: int) -> list[Mover]:
    proper = cells or tuple((rank,) for rank in range(tp))
    given = {cell: _Cell() for cell in proper}
    cell_of = {rank: cell for cell in proper for rank in cell}
    groups = [_Group(cell_of[rank], cell_of[rank].index(rank), given[cell_of[rank]]) for rank in range(tp)]
    return [Mover(cast(Any, group)) for group in groups]
