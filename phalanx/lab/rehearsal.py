"""A rank rehearses its part alone, one rank after the other, and from then on waits as long as that took.

So a lab with more ranks than processors shows what schedules and communication do (`compute=timed`): while a rank
measures its segments, on zeros of the true shapes, all others are silent. Everything but computation stays real: the
program, the engine, and every message and collective with tensors of their true sizes. What is computed is zeros, and
no weight gets a gradient of its own: nothing is learned.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch

from phalanx.comm.links import Group
from phalanx.engine.engine import Engine
from phalanx.engine.link import link
from phalanx.engine.linked import ComputeCall
from phalanx.engine.step import Step
from phalanx.engine.warm_up import warm_up
from phalanx.errors import PlanError
from phalanx.model.segment.segments import Call
from phalanx.program.instructions import COMPUTE, Op
from phalanx.tasks.base import Batch

_REPEATS = 3


def rehearse(step: Step, evaluation: Engine, world: Group, batch: Batch, first: int) -> None:
    """All ranks call it, each with its part of a batch. From now on the rank waits where it would compute."""
    if step.engine.parts.plan.slices:
        raise PlanError(
            "lab: compute=timed knows one time for every block, and slices take different times",
            "leave slices out, or compute=timed",
        )
    found: Durations = {}
    for turn in range(len(world.ranks)):
        if turn == world.index:
            found = measure(step, batch, first)
        world.barrier().wait("the rehearsal of another rank")
    for engine in (step.engine, evaluation):
        replace_compute(engine, found)


def measure(step: Step, batch: Batch, first: int) -> Durations:
    """Seconds of each kind of computation of each segment of this rank: the median of some without the first; nothing
    for what this rank does not do. A weight gradient counts with its product."""
    parts = step.engine.parts
    linked = link(parts, step.program, step.begin(batch, first, 0.0).inputs)
    by_function: defaultdict[Any, set[tuple[Op, int]]] = defaultdict(set)
    for call in linked.calls:
        by_function[call.call.function].add((call.instruction.op, call.number))
    seconds: defaultdict[tuple[Op, int], list[float]] = defaultdict(list)

    def timed(call: ComputeCall, run: Callable[[], Any]) -> None:
        begin = time.perf_counter()
        run()
        took = time.perf_counter() - begin
        for place in by_function[call.call.function]:  # segments that share functions take as long
            seconds[place].append(took)

    for _ in range(1 + _REPEATS):
        warm_up(linked, parts.compute, set(), timed)
    numbers = range(len(parts.graph.segments.blocks))
    return {op: tuple(_median(seconds.get((op, number), [])) for number in numbers) for op in COMPUTE}


def _median(seconds: list[float]) -> float:
    return statistics.median(seconds[1:]) if len(seconds) > 1 else 0.0


Durations = Mapping[Op, tuple[float, ...]]  # seconds of F, A, B, W and BW, per block or segment
_SPIN_SECONDS = 3e-4  # what sleeping may be late by


def replace_compute(engine: Engine, durations: Durations) -> None:
    """From now on the engine waits where it would compute."""
    device = engine.compute.device

    def stand_in(op: Op, number: int, call: Call) -> Callable[..., Any]:
        seconds = durations[op][number]

        def wait(*arguments: Any) -> list[Any]:
            until = time.perf_counter() + seconds
            looks = ((None if r is None else (r.shape, r.dtype)) for r in call.results)
            zeros = [None if look is None else torch.zeros(look[0], dtype=look[1], device=device) for look in looks]
            wait_until(until)
            return zeros

        return wait

    engine.stand_in(stand_in)


def wait_until(moment: float) -> None:
    """Sleeps, and spins at the end: sleeping alone is not exact enough."""
    time.sleep(max(0.0, moment - time.perf_counter() - _SPIN_SECONDS))
    while time.perf_counter() < moment:
        pass
