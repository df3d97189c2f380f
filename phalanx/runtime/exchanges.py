"""Exchanges between the ranks that split tensors: wires re-placed on their way from segment to segment, and their
gradients on the way back.

A collective is started where the program says so and awaited by whoever needs its result. Exchanges that send nothing
in a direction are carried out when their result is first asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as functional
from torch import Tensor

from phalanx.expressions import evaluate
from phalanx.model.shard.sharded import BACKWARD, FORWARD, Exchange, Part
from phalanx.program.shape import Partition
from phalanx.runtime.links import Group, Pending
from phalanx.runtime.micro_batch import MicroBatch, StageRun


@dataclass(frozen=True)
class Arriving:
    """A tensor on its way: what is made of it when it is here."""

    pending: Pending
    finish: Callable[[], Tensor]

    def wait(self, what: str) -> Tensor:
        self.pending.wait(what)
        return self.finish()


class Exchanges:
    """All exchanges of the model on this rank. group: the ranks that take part in an exchange over these cells; not
    asked for where there are no exchanges."""

    def __init__(
        self, parts: Sequence[Sequence[Part]], group: Callable[[Partition], Group] | None = None
    ) -> None:  # fmt: skip
        every = [part for block in parts for part in block if part.exchange is not None]
        self._by_target = {part.exchange.target: part for part in every if part.exchange}
        self._from: dict[str, list[Part]] = {}
        for part in every:
            assert part.exchange is not None
            self._from.setdefault(part.exchange.source, []).append(part)
        cells = {part.exchange.cells for part in every if part.exchange}
        self._movers = {own: Mover(group(own)) for own in cells} if group is not None else {}

    @property
    def moved_bytes(self) -> int:
        """Bytes of the whole tensors of all collectives so far."""
        return sum(mover.moved_bytes for mover in self._movers.values())

    # Forward.

    def send(self, part: Part, batch: MicroBatch, run: StageRun) -> None:
        """Starts the forward collective of an exchange."""
        exchange = _of(part)
        self.have([exchange.source], batch, run)
        run.differentiable[exchange.target] = run.differentiable[exchange.source]
        value = run.wires[exchange.source]
        run.arriving[exchange.target] = self._movers[exchange.cells].forward(exchange, value, _dims(part, batch))

    def have(self, wires: Iterable[str], batch: MicroBatch, run: StageRun) -> None:
        """Makes sure that wires are here: waits for those on their way, makes those that need no communication."""
        for wire in wires:
            if wire in run.arriving:
                run.wires[wire] = run.arriving.pop(wire).wait(wire)
            elif wire not in run.wires and wire in self._by_target:
                part = self._by_target[wire]
                exchange = _of(part)
                self.have([exchange.source], batch, run)
                mover = self._movers[exchange.cells]
                run.wires[wire] = mover.locally(exchange, run.wires[exchange.source], _dims(part, batch))
                run.differentiable[wire] = run.differentiable[exchange.source]

    def have_made_of(self, sources: Collection[str], wires: Iterable[str], batch: MicroBatch, run: StageRun) -> None:
        """Makes those wires that need no communication, of sources that will not be here any more."""
        made = (wire for wire in wires if wire not in run.arriving and wire in self._by_target)
        self.have([wire for wire in made if _of(self._by_target[wire]).source in sources], batch, run)

    # Backward.

    def send_back(self, part: Part, batch: MicroBatch, run: StageRun) -> None:
        """Starts the backward collective of an exchange; where there is no gradient on any rank, nothing is to do."""
        exchange = _of(part)
        self.collect([exchange.target], batch, run)
        gradient = run.gradients.pop(exchange.target, None)
        if gradient is not None:
            arriving = self._movers[exchange.cells].backward(exchange, gradient, _dims(part, batch))
            run.returning.setdefault(exchange.source, []).append(arriving)

    def collect(self, wires: Iterable[str], batch: MicroBatch, run: StageRun) -> None:
        """Adds to the gradients of wires what comes back through exchanges."""
        for wire in wires:
            for arriving in run.returning.pop(wire, ()):
                add_gradient(run, wire, arriving.wait(f"the gradient of {wire}"))
            for part in self._from.get(wire, ()):
                exchange = _of(part)
                if exchange.kind in BACKWARD:
                    continue
                self.collect([exchange.target], batch, run)
                gradient = run.gradients.pop(exchange.target, None)
                if gradient is not None:
                    mover = self._movers[exchange.cells]
                    add_gradient(run, wire, mover.locally_back(exchange, gradient, _dims(part, batch)))


def _of(part: Part) -> Exchange:
    assert part.exchange is not None
    return part.exchange


def _dims(part: Part, batch: MicroBatch) -> Mapping[str, int]:
    return batch.view(part.degree).dims


def add_gradient(run: StageRun, wire: str, gradient: Tensor) -> None:
    earlier = run.gradients.get(wire)
    run.gradients[wire] = gradient if earlier is None else earlier + gradient


class Mover:
    """The collectives of exchanges over one group, by kind."""

    def __init__(self, group: Group) -> None:
        self._group, self._count = group, len(group.ranks)
        self.moved_bytes = 0

    def forward(self, exchange: Exchange, value: Tensor, dims: Mapping[str, int]) -> Arriving:
        match FORWARD[exchange.kind]:
            case "all_reduce":
                return self._sum(value)
            case "reduce_scatter":
                return self._scatter(value, exchange)
            case _:
                return self._gather(value, exchange, dims)

    def backward(self, exchange: Exchange, gradient: Tensor, dims: Mapping[str, int]) -> Arriving:
        match BACKWARD[exchange.kind]:
            case "all_reduce":
                return self._sum(gradient)
            case "reduce_scatter":
                return self._scatter(gradient, exchange)
            case _:
                return self._gather(gradient, exchange, dims)

    def locally(self, exchange: Exchange, value: Tensor, dims: Mapping[str, int]) -> Tensor:
        return self._own_part(value, exchange) if exchange.kind == "part" else value

    def locally_back(self, exchange: Exchange, gradient: Tensor, dims: Mapping[str, int]) -> Tensor:
        match exchange.kind:
            case "join":
                return self._own_part(gradient, exchange)
            case "stack":
                return gradient[self._group.index].contiguous()
            case "scale":
                return gradient * exchange.factor
            case _:
                return gradient

    def _sum(self, value: Tensor) -> Arriving:
        total = value.clone(memory_format=torch.contiguous_format)  # others may still read what is summed
        self.moved_bytes += total.nbytes
        return Arriving(self._group.all_reduce(total), lambda: total)

    def _scatter(self, value: Tensor, exchange: Exchange) -> Arriving:
        parts = self._parts(value, exchange.dim)
        own = parts.new_empty(parts.shape[1:])
        self.moved_bytes += parts.nbytes
        return Arriving(self._group.reduce_scatter(own, parts), lambda: own)

    def _gather(self, value: Tensor, exchange: Exchange, dims: Mapping[str, int]) -> Arriving:
        value, dim = value.contiguous(), exchange.dim
        found = value.new_empty(self._count, *value.shape)
        pending = self._group.all_gather(found, value)
        self.moved_bytes += found.nbytes
        if exchange.kind == "stack":
            return Arriving(pending, lambda: found)
        size = evaluate(exchange.size, dims) if exchange.size else self._count * value.shape[dim]
        return Arriving(pending, lambda: _joined(found, dim, size))

    def _own_part(self, value: Tensor, exchange: Exchange) -> Tensor:
        return self._parts(value, exchange.dim)[self._group.index]

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
