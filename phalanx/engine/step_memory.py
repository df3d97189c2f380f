"""The most memory that a rank needs in a step, by the table of its program: what is there all the time, the values that
live, and what computations need while they run. What libraries keep for themselves is not counted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from phalanx.engine.compiled import Compiled
from phalanx.engine.gradients import wide
from phalanx.engine.reductions import StepRun
from phalanx.engine.step import Step
from phalanx.model.segment.segments import Segment
from phalanx.params.rank_state import State
from phalanx.params.state_facts import StateFacts
from phalanx.program.costs import BucketCosts
from phalanx.program.instructions import COMPUTE, Instruction, Op
from phalanx.program.memory import Sizes, live_bytes
from phalanx.program.values import HOST, RESIDENT, Value


def peak_bytes(step: Step, compiled: Compiled, state: State, run: StepRun) -> int:
    """run: a step that has begun and not run, whose micro-batches are looked at. Of slices the past is not known."""
    assert not compiled.plan.slices
    table = step.engine.linked(step.program, run.inputs).table
    sizes = _Sizes(step, compiled, run)
    live = [0, *live_bytes(table, sizes)]
    working = (
        before - sum(sizes(table.values[i]) for i in row.dropped) + sizes.working(row.instruction)
        for before, row in zip(live, table.rows, strict=False)
    )
    buffers = (*step.engine.compute.buffers.values(), *step.engine.compute.constants.values())
    return _stored([*state.tensors(), *buffers]) + max(max(live), max(working))


class _Sizes:
    """Bytes of values, and of what a computation needs beside them."""

    def __init__(self, step: Step, compiled: Compiled, run: StepRun) -> None:
        self._parts, self._inputs = step.engine.parts, dict(run.inputs)
        self._footprints: dict[int, dict[Op, int]] = {}
        first = self._parts.tracer(next(iter(self._inputs.values()))).shape(self._parts.shape)
        self._of_buckets = Sizes(self._parts.plan, {}, first, bucket_costs(compiled))

    def __call__(self, value: Value) -> int:
        if value.kind in RESIDENT:
            return 0
        if value.kind in ("gathered", "d_parameters", "reduced", "staged"):
            return self._of_buckets(value)
        inputs = self._inputs.get((value.micro_batch or 0, value.half or 0))
        if inputs is None or value.kind in ("loss", "items", "norm", "norms"):
            return 0
        if value.kind == "inputs":
            return inputs.num_bytes
        shape = self._parts.tracer(inputs, value.slice or 0).shape(self._parts.shape)
        if value.kind in ("activation", "gradient"):
            return int(shape.sizes[value.what])
        if value.is_on_host:
            return self(value._replace(kind=value.kind.removeprefix(HOST)))
        block, op = map(int, value.what.split(":"))
        return int(getattr(shape.ops_of(block)[op].bw, value.kind) or 0)

    def working(self, it: Instruction) -> int:
        if it.op not in COMPUTE:
            return 0
        traced = self._parts.tracer(self._inputs[it.micro_batch or 0, it.half or 0], it.slice or 0)
        number = self._parts.graph.part(it).segment
        assert number is not None
        segment = traced.segments[number]
        if id(segment) not in self._footprints:
            self._footprints[id(segment)] = _footprint(segment)
        return self._footprints[id(segment)][it.op]


def bucket_costs(compiled: Compiled) -> list[BucketCosts]:
    """Bytes of every bucket as it would lie on this rank."""
    shapes, trained = compiled.composed.local_shapes(), compiled.formation.shape.trained
    elements = [sum(math.prod(shapes[name]) for name in names) for names in compiled.composed.buckets.names]
    width, added, kept = compiled.dtype.itemsize, wide(compiled.dtype).itemsize, _state_bytes(compiled.formation.facts)
    return [
        BucketCosts(n * width, n * added, n * kept) if learns else BucketCosts(n * width)
        for n, learns in zip(elements, trained, strict=True)
    ]


def _state_bytes(facts: StateFacts) -> int:
    """Of the optimizer, for each element: masters, and what is known to be kept beside them."""
    slots = (getattr(torch, slot.dtype).itemsize for slot in facts.slots or () if not slot.is_counter)
    return sum(slots) + (torch.float32.itemsize if facts.masters else 0)


def _footprint(segment: Segment) -> dict[Op, int]:
    """At most, beside the values of the table."""
    found = segment.working()
    needs = {Op.F: found.forward, Op.A: found.forward, Op.B: found.backward, Op.W: found.weight, Op.BW: found.together}
    return {op: max(sizes, default=0) for op, sizes in needs.items()}


def _stored(tensors: Iterable[Tensor]) -> int:
    """Bytes of memory, each once."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())
