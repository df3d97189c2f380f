"""Computation replaced by waits of known length, so that more ranks can be measured than there are processors.

A rank rehearses its part alone, one rank after the other, and from then on waits as long as that took
(`compute=timed`): while a rank measures its blocks, on zeros of the true shapes, all others are silent. Everything else
is real: the program, the engine, and every message and collective with tensors of their true sizes. What is computed is
zeros, and no weight gets a gradient of its own: nothing is learned.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from typing import Any, cast

import torch
from torch import Tensor

from phalanx.errors import PlanError
from phalanx.model.segment.joint import Outline
from phalanx.program.instructions import COMPUTE, Op
from phalanx.runtime.accumulate import Accumulator
from phalanx.runtime.compute import Compute
from phalanx.runtime.engine import Engine
from phalanx.runtime.micro_batch import MicroBatch, StageRun
from phalanx.runtime.rank import Rank
from phalanx.tasks.base import Batch

Durations = Mapping[Op, tuple[float, ...]]  # seconds of F, A, B, W and BW, per block or segment
_SPIN_SECONDS = 3e-4  # what sleeping may be late by


def replace_compute(engine: Engine, durations: Durations) -> None:
    """From now on the engine waits where it would compute."""
    timed = TimedCompute(engine.compute, engine.parameters.values, durations)
    engine.compute = cast(Compute, timed)  # the engine uses nothing that is not there


class TimedCompute:
    """Takes the place of a Compute, which still says what everything looks like. `parameters`: those of this rank."""

    def __init__(self, inner: Compute, parameters: Mapping[str, Tensor], durations: Durations) -> None:
        self.blocks, self.device = inner.blocks, inner.device
        self._inner, self._parameters, self._durations = inner, parameters, durations
        self._inputs: dict[tuple[int, int], dict[str, Tensor]] = {}  # per stage run and block, for its backward

    def micro_batch(self, inputs: Mapping[str, Tensor], keys: Tensor, dims: dict[str, int]) -> MicroBatch:
        return self._inner.micro_batch(inputs, keys, dims)

    def outlines(
        self, number: int, batch: MicroBatch, run: StageRun, parameters: Mapping[str, Tensor]
    ) -> tuple[Outline, ...]:
        return self._inner.outlines(number, batch, run, parameters)

    def keeps_only_inputs(self) -> bool:
        return True

    def forward(self, number: int, batch: MicroBatch, run: StageRun, keep: bool, without: Collection[str] = ()) -> None:
        until = self._until(Op.F, number)
        if keep:
            self._keep_inputs(number, run)
        self._put_outputs(number, batch, run)
        wait_until(until)

    def again(self, number: int, batch: MicroBatch, run: StageRun, outputs: bool) -> None:
        until = self._until(Op.A, number)
        self._keep_inputs(number, run)
        if outputs:
            self._put_outputs(number, batch, run)
        wait_until(until)

    def backward(self, number: int, run: StageRun) -> None:
        self._backward(Op.B, number, run)

    def weight(self, number: int, run: StageRun) -> list[Tensor | None]:
        wait_until(self._until(Op.W, number))
        return self._no_gradients(number)

    def backward_weight(self, number: int, run: StageRun) -> list[Tensor | None]:
        self._backward(Op.BW, number, run)
        return self._no_gradients(number)

    def _backward(self, op: Op, number: int, run: StageRun) -> None:
        until = self._until(op, number)
        for wire in self.blocks.blocks[number].outputs:
            run.gradients.pop(wire, None)
        for wire, tensor in self._inputs.pop((id(run), number)).items():
            if wire not in run.gradients:
                run.gradients[wire] = torch.zeros_like(tensor)
        wait_until(until)

    def _keep_inputs(self, number: int, run: StageRun) -> None:
        needed = (wire for wire in self.blocks.blocks[number].names("wire") if run.differentiable[wire])
        self._inputs[id(run), number] = {wire: run.wires[wire] for wire in needed}

    def _put_outputs(self, number: int, batch: MicroBatch, run: StageRun) -> None:
        outlines = self.outlines(number, batch, run, self._parameters)
        for wire, look in zip(self.blocks.blocks[number].outputs, outlines, strict=True):
            run.wires[wire], run.differentiable[wire] = look.empty(self.device).zero_(), look.differentiable

    def _no_gradients(self, number: int) -> list[Tensor | None]:
        return [None] * len(self.blocks.blocks[number].names("parameter"))

    def _until(self, op: Op, number: int) -> float:
        return time.perf_counter() + self._durations[op][number]


def wait_until(moment: float) -> None:
    """Sleeps, and spins at the end: sleeping alone is not exact enough."""
    time.sleep(max(0.0, moment - time.perf_counter() - _SPIN_SECONDS))
    while time.perf_counter() < moment:
        pass


_REPEATS = 3


def rehearse(rank: Rank, batch: Batch, first: int) -> None:
    """All ranks call it, each with its part of a batch. From now on the rank waits where it would compute."""
    if rank.plan.slices:
        raise PlanError(
            "lab: compute=timed knows one time for every block, and slices take different times",
            "leave slices out, or compute=timed",
        )
    found: Durations = {}
    for turn in range(rank.seat.world):
        if turn == rank.seat.rank:
            found = _measure(rank, batch, first)
        rank.connections.world.barrier().wait("the rehearsal of another rank")
    for engine in rank.engines:
        replace_compute(engine, found)


def _measure(rank: Rank, batch: Batch, first: int) -> Durations:
    batches = rank.step.begin(batch, first, 0.0).batches
    stopwatch = Stopwatch(rank.step.engine.compute)
    for _ in range(1 + _REPEATS):  # each is new, and so runs every block
        rank.warm_up(cast(Compute, stopwatch))(rank.step.program, batches[:1])
    return stopwatch.durations()


class Stopwatch:
    """Takes the place of a Compute, and times what it does. A weight gradient counts with its product."""

    def __init__(self, inner: Compute, seconds: dict[tuple[Op, int], list[float]] | None = None) -> None:
        self.blocks, self.device = inner.blocks, inner.device
        self._inner = inner
        self._seconds = defaultdict[tuple[Op, int], list[float]](list) if seconds is None else seconds

    def on(self, parameters: Mapping[str, Tensor]) -> Stopwatch:
        return Stopwatch(self._inner.on(parameters), self._seconds)

    def forward(self, number: int, *arguments: Any, **options: Any) -> None:
        self._timed(Op.F, number, lambda: self._inner.forward(number, *arguments, **options))

    def again(self, number: int, *arguments: Any) -> None:
        self._timed(Op.A, number, lambda: self._inner.again(number, *arguments))

    def backward(self, number: int, *arguments: Any) -> None:
        self._timed(Op.B, number, lambda: self._inner.backward(number, *arguments))

    def weight(self, number: int, *arguments: Any) -> list[Any]:
        return self._timed(Op.W, number, lambda: self._added(number, self._inner.weight(number, *arguments)))

    def backward_weight(self, number: int, *arguments: Any) -> list[Any]:
        return self._timed(Op.BW, number, lambda: self._added(number, self._inner.backward_weight(number, *arguments)))

    def durations(self) -> Durations:
        """The median of each without the first; nothing for what this rank does not do."""
        return {
            op: tuple(self._median(self._seconds.get((op, number), [])) for number in range(len(self.blocks.blocks)))
            for op in COMPUTE
        }

    @staticmethod
    def _median(seconds: list[float]) -> float:
        return statistics.median(seconds[1:]) if len(seconds) > 1 else 0.0

    def _added(self, number: int, gradients: list[Any]) -> list[Any]:
        names = self.blocks.blocks[number].names("parameter")
        sums = Accumulator()
        sums.add(names, gradients)
        added = sums.take()
        return [added.pop(name, None) for name in names]

    def _timed(self, op: Op, number: int, work: Callable[[], Any]) -> Any:
        begin = time.perf_counter()
        result = work()
        self._seconds[op, number].append(time.perf_counter() - begin)
        return result
