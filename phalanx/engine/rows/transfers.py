"""Calls that bring values elsewhere: to the ranks that split tensors, to other stages, to the host and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from phalanx.comm.links import Direction
from phalanx.engine.linked import (
    Argument,
    Run,
    Values,
)
from phalanx.engine.redistribute import Arriving
from phalanx.engine.reductions import StepRun
from phalanx.engine.rows.maker import Linking, Maker, block_of, nothing, part_of, unscaled
from phalanx.model.shard.sharded import Redistribution
from phalanx.program.instructions import Instruction, Op, is_fetch
from phalanx.program.values import HOST


class Transfers(Maker):
    """What a rank sends, receives and moves."""

    def __init__(self, linking: Linking) -> None:
        super().__init__(linking)
        self.makers = {
            Op.CF: self._redistribute, Op.CA: self._redistribute, Op.LF: self._redistribute, Op.LA: self._redistribute,
            Op.CB: self._redistribute_back, Op.LB: self._redistribute_back, Op.SEND_F: self._send_forward,
            Op.RECV_F: self._receive_forward, Op.SEND_B: self._send_backward, Op.RECV_B: self._receive_backward,
            Op.OUT: self._move_out, Op.IN: self._move_in,
        }  # fmt: skip

    def _redistribute(self, it: Instruction) -> Run:
        redistribution, dims = self._moved(it)
        (place,), move = self._row.writes, self._parts.movers[redistribution.cells].forward(redistribution, dims)
        source = self._read(it, redistribution.source)

        def run(values: Values, step: StepRun) -> None:
            values[place] = move(values[source])

        return run

    def _redistribute_back(self, it: Instruction) -> Run:
        if not (self._row.writes or self._row.adds):
            return nothing  # no gradient came, on any rank
        redistribution, dims = self._moved(it)
        move = self._parts.movers[redistribution.cells].backward(redistribution, dims)
        name = self._names.gradient.get(redistribution.target, redistribution.target)
        is_d_loss = self._names.is_d_loss(redistribution.target)
        gradient = self._extra["d_loss"] if is_d_loss else self._taken()[name]
        d_loss = self._scale(self._traced(it).outlines[redistribution.target].dtype) if is_d_loss else unscaled
        given = self._names.gradient.get(redistribution.source, redistribution.source)
        found = self._valued((*self._row.adds, *self._row.writes), "gradient")
        place = [i for i, v in found if v.what == given][-1]
        before = [i for i, v in self._valued(self._row.reads, "gradient") if v.what == given and i != gradient]
        earlier = before[0] if before else place

        def run(values: Values, step: StepRun) -> None:
            d_loss(values)
            moved, there = move(values[gradient]), values[earlier]
            values[place] = moved if there is None else there + moved

        return run

    def _moved(self, it: Instruction) -> tuple[Redistribution, Mapping[str, int]]:
        part = self._parts.graph.part(it)
        assert part.redistribution is not None
        return part.redistribution, self._inputs[it.micro_batch or 0, it.half or 0].dims(it.slice or 0, part.degree)

    def _send_forward(self, it: Instruction) -> Run:
        stage, peer = _ends(it)
        channel, sends = self._parts.channel(self._parts.rank, peer, "f"), self._parts.sends
        places = [self._read(it, name) for name in self._names.crossing(stage + 1, it.slice)]

        def run(values: Values, step: StepRun) -> None:
            for place in places:
                sends.add(channel.send(values[place]))

        return run

    def _send_backward(self, it: Instruction) -> Run:
        """Zero for one that the loss does not depend on."""
        stage, peer = _ends(it)
        channel, sends, traced = self._parts.channel(self._parts.rank, peer, "b"), self._parts.sends, self._traced(it)
        gradients = self._taken()
        wanted: list[Argument] = []
        for name in self._names.returning(stage, it.slice):
            place, look = gradients.get(self._names.gradient.get(name, name)), traced.outlines[name]
            wanted.append((self._extra["zeros"], (look.shape, look.dtype)) if place is None else (place, None))

        def run(values: Values, step: StepRun) -> None:
            for i, key in wanted:
                sends.add(channel.send((values[i] if key is None else values[i][key]).contiguous()))

        return run

    def _receive_forward(self, it: Instruction) -> Run:
        stage, _ = _ends(it)
        return self._receive(it, self._names.crossing(stage, it.slice), "f")

    def _receive_backward(self, it: Instruction) -> Run:
        stage, _ = _ends(it)
        return self._receive(it, self._names.returning(stage + 1, it.slice), "b")

    def _receive(self, it: Instruction, names: Sequence[str], direction: Direction) -> Run:
        """Makes room for what is to come and starts receiving it."""
        _, peer = _ends(it)
        channel, device = self._parts.channel(peer, self._parts.rank, direction), self._parts.compute.device
        looks = [self._traced(it).outlines[name] for name in names]
        places = list(zip(self._row.writes, looks, strict=True))

        def run(values: Values, step: StepRun) -> None:
            for place, look in places:
                buffer = look.empty(device)
                values[place] = Arriving(channel.recv(buffer), lambda buffer=buffer: buffer)

        return run

    # Between device and host.

    def _move_out(self, it: Instruction) -> Run:
        if it.stage is None:
            return self._gradients_out(it) if it.op_index is None else self._state_out(it)
        moves, copies = list(zip(self._row.reads, self._row.writes, strict=True)), self._parts.copies

        def run(values: Values, step: StepRun) -> None:
            for source, target in moves:
                values[target] = copies.out(values[source])

        return run

    def _gradients_out(self, it: Instruction) -> Run:
        totals, hosted, bucket = self._parts.totals, self._parts.hosted, block_of(it)
        sums = self._sums()
        ((there, _),) = self._valued(self._row.writes, f"{HOST}d_parameters")
        ((norms, _),) = self._valued(self._row.writes, "norms")
        assert totals is not None and hosted is not None, f"bucket {bucket} is not kept on the host"

        def run(values: Values, step: StepRun) -> None:
            gradients: dict[str, Tensor] = {}
            for i in sums:
                gradients |= {} if values[i] is None else values[i].pieces()
            values[norms] = totals.norms(gradients)
            left = hosted.leave(bucket, gradients)
            step.gradients |= left.pieces
            values[there] = Arriving(left.copying, lambda: left)

        return run

    def _state_out(self, it: Instruction) -> Run:
        hosted, part, ((place, _),) = self._parts.hosted, part_of(it), self._valued(self._row.adds, f"{HOST}state")
        assert hosted is not None

        def run(values: Values, step: StepRun) -> None:
            values[place] = Arriving(hosted.store(part), lambda: None)

        return run

    def _state_in(self, it: Instruction) -> Run:
        hosted, part, (place,) = self._parts.hosted, part_of(it), self._row.writes
        gradients = next((i for i, _ in self._valued(self._row.reads, f"{HOST}d_parameters")), None)
        assert hosted is not None

        def run(values: Values, step: StepRun) -> None:
            left = None if gradients is None else values[gradients]
            values[place] = Arriving(hosted.fetch(part, left), lambda: True)

        return run

    def _fetch(self, it: Instruction) -> Run:
        bucket, parameters = block_of(it), self._parts.parameters
        return lambda values, step: parameters.fetch(bucket)

    def _move_in(self, it: Instruction) -> Run:
        if it.stage is None:
            return self._fetch(it) if is_fetch(it) else self._state_in(it)
        moves, copies = list(zip(self._row.reads, self._row.writes, strict=True)), self._parts.copies

        def run(values: Values, step: StepRun) -> None:
            for source, target in moves:
                values[target] = copies.back(values[source])

        return run


def _ends(it: Instruction) -> tuple[int, int]:
    assert it.stage is not None and it.peer is not None
    return it.stage, it.peer
