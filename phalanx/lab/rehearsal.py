"""A rank rehearses its part alone, one rank after the other, and from then on waits as long as that took.

So a lab with more ranks than processors shows what schedules and communication do (`compute=timed`): while a rank
measures its blocks, on zeros of the true shapes, all others are silent.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, cast

from torch import Tensor

from phalanx.errors import PlanError
from phalanx.lab.timed import Durations, replace_compute
from phalanx.program.instructions import COMPUTE, Op
from phalanx.runtime.accumulate import Accumulator
from phalanx.runtime.compute import Compute
from phalanx.runtime.rank import Rank
from phalanx.tasks.base import Batch

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
