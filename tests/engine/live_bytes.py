"""What really lies on a rank after every instruction, beside what the table of its program says."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from phalanx.engine.redistribute import Arriving
from phalanx.engine.reductions import StepRun
from phalanx.launch.context import RankContext
from phalanx.program.instructions import Instruction, Op
from phalanx.program.values import Value
from phalanx.session.session import Session
from tests import captured

KINDS = ("activation", "gradient", "saved_b", "saved_bw", "saved_w")


class Watched:
    """Bytes after each instruction: of the memory that values of the kinds really have."""

    def __init__(self, step: StepRun) -> None:
        self._step = step
        self.found: list[tuple[str, int]] = []

    def begin(self, instruction: Instruction) -> None: ...

    def ready(self, instruction: Instruction) -> None: ...

    def end(self, instruction: Instruction) -> None:
        storages: dict[int, int] = {}
        extra = 0
        for value, there in zip(self._step.linked.table.values, self._step.values, strict=False):
            if value.kind not in KINDS or there is None:
                continue
            if isinstance(there, Arriving):
                extra += self.size(value)  # nothing but its sender knows what it will be
                continue
            for tensor in [there] if isinstance(there, Tensor) else there:
                storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        self.found.append((str(instruction), sum(storages.values()) + extra))

    size: Any = None


def mismatches(session: Session, batch: dict[str, Tensor]) -> list[str]:
    """Instructions after which the bytes differ; a step is run for it."""
    engine = session.step.engine
    first, count = session.part(0, next(iter(batch.values())).shape[0])
    step = session.step.begin({name: tensor[first : first + count] for name, tensor in batch.items()}, first, 0.0)
    inputs, tracer, shape = dict(step.inputs), engine.parts.tracer, engine.parts.shape

    def size(value: Value) -> int:
        described = tracer(inputs[value.micro_batch or 0, value.half or 0], value.slice or 0).shape(shape)
        if value.kind in ("activation", "gradient"):
            return int(described.sizes[value.what])
        block, number = map(int, value.what.split(":"))
        return int(getattr(described.ops_of(block)[number].bw, value.kind) or 0)

    watched = Watched(step)
    watched.size = size
    engine.watches.append(watched)
    try:
        engine.run(session.step.program, step, until=Op.STEP)
    finally:
        engine.watches.remove(watched)
    expected = live_of_kinds(step.linked.table, size)
    pairs = zip(watched.found, expected, strict=False)
    engine.run(session.step.program, step)
    return [f"{name}: {there} bytes, {said} in the table" for (name, there), said in pairs if there != said]


def live_of_kinds(table: Any, size: Any) -> list[int]:
    """As `live_bytes`, of the kinds alone."""
    users: dict[int, int] = {}
    sizes: dict[int, int] = {}
    now, found = 0, list[int]()
    for row in table.rows:
        for i in row.writes:
            value = table.values[i]
            if value.kind in KINDS:
                if not users.get(value.memory):
                    sizes[value.memory] = size(value)
                    now += sizes[value.memory]
                users[value.memory] = users.get(value.memory, 0) + 1
        for i in row.frees:
            value = table.values[i]
            if value.kind in KINDS:
                users[value.memory] -= 1
                if not users[value.memory]:
                    now -= sizes[value.memory]
        found.append(now)
    return found


def on_rank(context: RankContext, name: str, plan: str) -> list[str]:
    """For a rank of a pool."""
    case = captured.named(name, samples=4, tokens=8)
    session = case.session(plan, context=context)
    try:
        return mismatches(session, case.batch)
    finally:
        session.close()
