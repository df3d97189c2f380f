"""Runs a lowered program, and does nothing that it was not told to.

A row of the program's table at a time: wait for what is on its way, run, drop what is freed. What a row means was
settled when the program was linked (`link.py`); here is only the loop.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from phalanx.engine.inputs import Inputs
from phalanx.engine.link import extras_of, link
from phalanx.engine.linked import Linked, Parts, StandIn
from phalanx.engine.reductions import Place, StepRun
from phalanx.engine.warm_up import warm_up
from phalanx.program.instructions import Instruction, Op, Program

_MAX_LINKED = 16  # programs times shapes of their micro-batches that are remembered


class Watch(Protocol):
    """Told of every instruction before and after it runs (the status board for the supervisor, a timeline); and in
    between, when it has everything that it waited for."""

    def begin(self, instruction: Instruction) -> None: ...

    def ready(self, instruction: Instruction) -> None: ...

    def end(self, instruction: Instruction) -> None: ...


class Executed(Counter[Op]):
    """A watch that counts instructions by what they do."""

    def begin(self, instruction: Instruction) -> None: ...

    def ready(self, instruction: Instruction) -> None: ...

    def end(self, instruction: Instruction) -> None:
        self[instruction.op] += 1


class Engine:
    """One rank's executor. warms_up: everything is run once before ranks depend on each other."""

    def __init__(self, parts: Parts, *, watches: Iterable[Watch] = (), warms_up: bool = False) -> None:
        self.parts, self._warms_up = parts, warms_up
        self.watches: list[Watch] = list(watches)
        self._linked: dict[tuple[object, ...], Linked] = {}
        self._extras = extras_of(parts)
        self._warm: set[object] = set()

    @property
    def compute(self):
        return self.parts.compute

    @property
    def parameters(self):
        return self.parts.parameters

    def linked(self, program: Program, inputs: Mapping[Place, Inputs]) -> Linked:
        """The program as calls, for micro-batches of these shapes."""
        key = (id(program), *((place, part.shape_key) for place, part in inputs.items()))
        if key not in self._linked:
            if len(self._linked) >= _MAX_LINKED:
                self._linked.pop(next(iter(self._linked)))
            self._linked[key] = link(self.parts, program, inputs)
        return self._linked[key]

    def stand_in(self, functions: StandIn) -> None:
        """From now on something else is called than the segments' functions."""
        self.parts = replace(self.parts, stand_in=functions)
        self._linked.clear()

    def run(self, program: Program, step: StepRun, until: Op | int | None = None) -> None:
        """Runs the instructions in order, to the end, to a place or to the first of a kind; a later call goes on from
        there."""
        if step.linked is None:
            step.linked = self.linked(program, step.inputs)
            step.values = step.linked.fresh(self._extras)
            if self._warms_up:
                warm_up(step.linked, self.parts.compute, self._warm)
            step.linked.calls.clear()  # they hold this step's micro-batches
        end = len(step.linked.rows) if until is None else until
        with torch.no_grad():
            self._run(step, step.linked.first[end] if isinstance(end, Op) else end)

    def enter(self, step: StepRun, linked: Linked, position: int) -> None:
        """Begins a run in the middle of a program whose first part was run before, perhaps several times."""
        step.linked, step.values, step.position = linked, linked.fresh(self._extras), position

    def abandon(self, step: StepRun) -> None:
        """What is left of a run is not run; what it would have freed is."""
        for row in step.linked.rows[step.position :]:
            for place, release in row.releases:
                release(step.values[place])
            for place in (*row.drops, *row.frees):
                step.values[place] = None
        step.position = len(step.linked.rows)

    def complete(self, step: StepRun, sums: Tensor) -> None:
        """Ends a step that lost its links after its gradients were reduced: the update, without telling others of it.
        sums: what NORM found on a rank that it came to."""
        totals = self.parts.totals
        assert totals is not None and step.reduced
        if step.sums is None:
            totals.found(step, sums)
        with torch.no_grad():
            for row in step.linked.rows[step.position :]:
                if row.instruction.op is Op.STEP and row.instruction.block is None:
                    if step.updated is None:
                        totals.step(step)
                elif row.instruction.op not in (Op.NORM, Op.SHARE):
                    for place, wait in row.waits:
                        step.values[place] = wait(step.values[place])
                    row.run(step.values, step)
        step.position = len(step.linked.rows)

    def _run(self, step: StepRun, end: int) -> None:
        """Whether there are watches is asked first: that costs less than a loop over none, which a lone rank has."""
        values, watches, done = step.values, self.watches, step.position
        try:
            for instruction, waits, drops, run, frees, releases in step.linked.plain[done:end]:
                if watches:
                    for watch in watches:
                        watch.begin(instruction)
                for place, wait in waits:
                    values[place] = wait(values[place])
                if watches:
                    for watch in watches:
                        watch.ready(instruction)
                for place in drops:
                    values[place] = None
                run(values, step)
                for place, release in releases:
                    release(values[place])
                for place in frees:
                    values[place] = None
                if watches:
                    for watch in watches:
                        watch.end(instruction)
                done += 1
        finally:
            step.position = done

    def settle(self) -> None:
        """Waits until nothing is on its way, in or out."""
        self.parts.parameters.settle()
        self.parts.sends.settle()
