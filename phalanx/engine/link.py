"""From a program bound to its values to calls: which function each instruction is, and where its arguments lie.

Done once for each program and shape of its micro-batches. Nothing is decided here: a call computes or sends what its
row of the table says, on values that the engine keeps by their places.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from phalanx.engine.gradients import Reduced
from phalanx.engine.host_copies import HostValue
from phalanx.engine.inputs import Inputs
from phalanx.engine.linked import (
    HeldPast,
    Linked,
    LinkedRow,
    Parts,
    Run,
    Values,
)
from phalanx.engine.redistribute import Arriving
from phalanx.engine.reductions import Place, StepRun
from phalanx.engine.rows.computations import Computations
from phalanx.engine.rows.maker import Linking
from phalanx.engine.rows.transfers import Transfers
from phalanx.engine.rows.update import Update
from phalanx.engine.trace import shape_for
from phalanx.params.hosted import Left
from phalanx.program.bind import bind
from phalanx.program.instructions import Program
from phalanx.program.rules import Names
from phalanx.program.values import HOST, Row

_PARAMETERS = ("parameters", "fetched", "gathered", f"{HOST}parameters")


def link(parts: Parts, program: Program, inputs: Mapping[Place, Inputs]) -> Linked:
    """For micro-batches that look like these."""
    return _Linker(parts, program, inputs).run()


class _Zeros:
    """A gradient that nobody gave."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __getitem__(self, look: tuple[tuple[int, ...], torch.dtype]) -> Tensor:
        return torch.zeros(look[0], dtype=look[1], device=self._device)


def extras_of(parts: Parts) -> dict[str, Any]:
    compute = parts.compute
    return {
        "parameters": parts.parameters.values, "buffers": compute.buffers, "constants": compute.constants,
        "zeros": _Zeros(compute.device), "d_loss": None,
    }  # fmt: skip


class _Linker:
    def __init__(self, parts: Parts, program: Program, inputs: Mapping[Place, Inputs]) -> None:
        shape = shape_for(parts.tracer, parts.shape, program, inputs)
        self._parts, self._linked = parts, Linked(bind(parts.plan, shape, program, parts.pp_index))
        linking = Linking(parts, inputs, shape, Names(parts.plan, shape), self._linked)
        makers = Computations(linking), Transfers(linking), Update(linking)
        self._makers = {op: maker for maker in makers for op in maker.makers}

    def run(self) -> Linked:
        for row in self._linked.table.rows:
            made = self._collected(row, self._makers[row.instruction.op].make(row))
            waits = tuple((i, self._wait(i)) for i in row.waits)
            releases = [(i, release) for i in row.frees if (release := self._release(i)) is not None]
            drops = tuple(i for i in row.dropped if self._release(i) is None)
            frees = tuple(i for i in row.frees if i not in drops)
            self._linked.rows.append(LinkedRow(row.instruction, waits, drops, made, frees, tuple(releases)))
        return self._linked

    def _collected(self, row: Row, run: Run) -> Run:
        """Adds up first what has arrived for sums."""
        collects = row.collects
        if not collects:
            return run

        def collect(values: Values, step: StepRun) -> None:
            for place, parts in collects:
                for part in parts:
                    there, new = values[place], values[part]
                    if isinstance(new, Reduced):
                        there.add(new)
                    else:
                        values[place] = new if there is None else there + new
            run(values, step)

        return collect

    def _wait(self, place: int) -> Callable[[Any], Any]:
        value, parameters = self._linked.table.values[place], self._parts.parameters
        if value.kind in _PARAMETERS:
            buckets = (int(value.what),)

            def ready(there: Any) -> None:
                parameters.ready(buckets)

            return ready
        what = str(value)
        return lambda there: there.wait(what) if isinstance(there, Arriving) else there

    def _release(self, place: int) -> Callable[[Any], None] | None:
        value, plan, parameters = self._linked.table.values[place], self._parts.plan, self._parts.parameters
        if value.kind == "fetched" and plan.gathers:
            return lambda there: parameters.drop(int(value.what))
        if value.kind in ("gathered", "fetched"):
            return lambda there: parameters.free(int(value.what))
        if value.kind == f"{HOST}d_parameters" and not plan.steps_on_host:  # else who updates does
            return lambda there: there.release() if isinstance(there, Left) else None
        if value.kind in ("past", "reduced", "d_parameters") or value.is_on_host:
            return lambda there: there.release() if isinstance(there, Reduced | HeldPast | HostValue) else None
        return None
