"""What facts say that ranks do, told by a process without torch, and what ranks really do."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from phalanx.launch.context import RankContext
from phalanx.model.facts.facts import Dims
from phalanx.plan.plan import Plan
from phalanx.program.instructions import COMPUTE, Instruction
from phalanx.program.values import RESIDENT

KINDS = ("activation", "gradient", "saved_b", "saved_bw", "saved_w")
Record = list[tuple[str, dict[str, int | None], list[str]]]  # instruction, bytes of what it writes, what it frees

_ALONE = """
import json, sys
from tests.engine.facts_record import compiled_record
given = json.load(sys.stdin)
found = compiled_record(given["facts"], given["plan"], given["dims"])
assert "torch" not in sys.modules, "facts need no torch"
json.dump(found, sys.stdout)
"""


def without_torch(facts: str, plan: Plan, dims: Dims) -> list[Record]:
    """By place in the pipeline. facts: as they are shipped."""
    given = json.dumps({"facts": facts, "plan": plan.to_json(), "dims": dict(dims)})
    done = subprocess.run([sys.executable, "-c", _ALONE], input=given, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [[(name, writes, frees) for name, writes, frees in record] for record in json.loads(done.stdout)]


def compiled_record(facts: str, plan_json: str, dims: Dims) -> list[Record]:
    from phalanx.predict.from_facts import Device, costs_of_facts
    from phalanx.predict.memory import Sizes
    from phalanx.predict.split_facts import Split, read_all
    from phalanx.program.compile import compile_plan

    plan = Plan.from_json(plan_json)
    described = read_all(facts).get(Split.of(plan))
    assert described is not None
    shape = described.shape(compiled=False)
    compiled = compile_plan(plan, shape)
    size = Sizes.of(compiled, costs_of_facts(described, shape, dims, Device()))
    found: list[Record] = []
    for table in compiled.tables:
        rows: Record = [
            (
                str(row.instruction),
                {str(v): size(v) for v in (table.values[i] for i in row.writes) if v.kind in KINDS},
                sorted(table.named(row.frees)),
            )
            for row in table.rows
        ]
        found.append(rows)
    return found


@dataclass
class Happened:
    """One instruction of a rank: the memory of what came to be, and what was dropped."""

    instruction: Instruction
    writes: dict[str, dict[int, int] | None] = field(default_factory=dict[str, "dict[int, int] | None"])
    frees: list[str] = field(default_factory=list[str])
    waits: bool = False

    def record(self) -> tuple[str, dict[str, int | None], list[str]]:
        """What is saved counts without activations whose memory it has."""
        known = {at for name, own in self.writes.items() if own and not name.startswith("saved") for at in own}
        sizes = {
            name: None if own is None else sum(n for at, n in own.items() if name[:5] != "saved" or at not in known)
            for name, own in self.writes.items()
        }
        return str(self.instruction), sizes, sorted(self.frees)


class Watched(list[Any]):
    """The values of a step, which notes what is put there and dropped; also told of every instruction. What a wait for
    parameters puts in their place says nothing: they lie elsewhere."""

    def __init__(self, values: list[Any], names: list[Any]) -> None:
        super().__init__(values)
        self._names = names
        self._writer: dict[int, Happened] = {}
        self.happened: list[Happened] = []

    def begin(self, instruction: Instruction) -> None:
        self.happened.append(Happened(instruction, waits=instruction.op in COMPUTE))

    def ready(self, instruction: Instruction) -> None:
        self.happened[-1].waits = False

    def end(self, instruction: Instruction) -> None: ...

    def __setitem__(self, place: Any, there: Any) -> None:
        super().__setitem__(place, there)
        now = self.happened[-1]
        if place >= len(self._names) or self._names[place].kind in RESIDENT or (there is None and now.waits):
            return
        name = str(self._names[place])
        if there is None:
            now.frees.append(name)
        elif self._names[place].kind in KINDS:
            writer = self._writer.setdefault(place, now)
            if writer.writes.get(name) is None:
                writer.writes[name] = _memory(there)


def _memory(there: Any) -> dict[int, int] | None:
    """Bytes by where they are; what is on its way is not known before it is here."""
    from torch import Tensor

    tensors = [there] if isinstance(there, Tensor) else there
    if not isinstance(tensors, list | tuple):
        return None
    return {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}


def on_rank(context: RankContext, name: str, overrides: dict[str, Any], plan: str, samples: int, tokens: int) -> Record:
    """A step of a rank of a pool, as it happened."""
    from tests import captured

    case = captured.named(name, samples=samples, tokens=tokens, **overrides)
    rank = case.session(plan, context=context)
    try:
        engine = rank.step.engine
        first, count = rank.part(0, samples)
        step = rank.step.begin({n: t[first : first + count] for n, t in case.batch.items()}, first, 0.0)
        step.linked = engine.linked(rank.step.program, step.inputs)
        step.values = watched = Watched(step.linked.fresh(engine._extras), list(step.linked.table.values))
        engine.watches.append(watched)
        engine.run(rank.step.program, step)
        return [own.record() for own in watched.happened]
    finally:
        rank.close()


def differences(facts: Record, rank: Record, same_sizes: bool) -> Iterator[str]:
    """same_sizes: or else a rank, whose part of what is split may be smaller, has no more than facts say."""
    if [row[0] for row in facts] != [row[0] for row in rank]:
        yield f"instructions: {[row[0] for row in facts]} in facts, {[row[0] for row in rank]} on the rank"
        return
    for (instruction, said, said_frees), (_, there, frees) in zip(facts, rank, strict=True):
        if said_frees != frees:
            yield f"{instruction} frees {said_frees} in facts, {frees} on the rank"
        # An output that is computed again and read by nobody is not made at all.
        if set(there) - set(said) or set(said) - set(there) - set(said_frees):
            yield f"{instruction} writes {sorted(said)} in facts, {sorted(there)} on the rank"
            continue
        for name, size in there.items():
            said_size = said[name] or 0
            if size is not None and (size != said_size if same_sizes else size > said_size):
                yield f"{instruction} writes {name}: {said_size} bytes in facts, {size} on the rank"
