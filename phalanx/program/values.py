"""The values of a program: everything that exists while a step runs, by name, and what each instruction does with it.

A table says for every instruction of one rank what it waits for, reads, writes, adds to and frees. It is made once, by
`bind.py`; the engine runs it, the checks, the simulation, the memory and the pictures read it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from phalanx.program.instructions import HALVES, Instruction, Op

Ids = tuple[int, ...]  # places in `Table.values`
Collect = tuple[int, Ids]  # a sum, and what arrived to be added to it

# What lives as long as the rank does: no instruction writes it for the first time, none frees it.
HOST = "host."  # before the kind of what lies in the memory of the host
RESIDENT = frozenset(("parameters", "state", f"{HOST}parameters", f"{HOST}state"))


class Value(NamedTuple):
    """One thing with one life: from the instruction that writes it to the one that frees it.

    kind: inputs (of a micro-batch), activation, loss, saved_b and saved_bw (what a forward leaves for B alone, and for
        W too), saved_w (what B leaves for W), past and d_past (keys and values of earlier slices, their gradients),
        gradient (of an activation), parameters, fetched (from the host, all or this rank's shard), gathered,
        d_parameters (their gradients, summed up here), reduced (over ranks), norms (of those that left), state (of the
        optimizer), staged (a part of it that came from the host, with gradients that left), items (of the global
        batch), norm. With `host.` before it: on the host.
    what: an activation's name; the segment `block:step`; the bucket; of state on the host `bucket:part`.
    slice: None for what belongs to the whole micro-batch. stage: the first of the consecutive stages of this rank in
        which it lives; on another visit of the rank the same activation is another value.
    version: how often it was written before; part: of a sum, which of those that arrive from other ranks.
    size: bytes, as an expression over the dims of its micro-batch; empty for what is known by bucket.
    memory: the value whose memory it is, by its place in the table; its own unless it shares another's.
    """

    kind: str
    what: str
    micro_batch: int | None
    slice: int | None
    half: int | None
    stage: int | None
    version: int
    part: int
    size: str
    memory: int

    @property
    def is_on_host(self) -> bool:
        return self.kind.startswith(HOST)

    def __str__(self) -> str:
        place = "" if self.micro_batch is None else f".{self.micro_batch}"
        place += "" if self.slice is None else f".{self.slice}"
        place += "" if self.half is None else HALVES[self.half]
        again = f"'{self.version}" if self.version else ""
        return f"{self.kind}({self.what}){place}{again}{f'+{self.part}' if self.part else ''}"


class Row(NamedTuple):
    """One instruction. waits: values that are on their way and must have arrived. collects: parts of sums that have
    arrived and are added up first. An instruction that frees a value it also writes leaves nothing of it behind; one
    that it does not touch, because what was made of it has arrived, is freed before it runs."""

    instruction: Instruction
    waits: Ids
    collects: tuple[Collect, ...]
    reads: Ids
    writes: Ids
    adds: Ids
    frees: Ids

    @property
    def dropped(self) -> Ids:
        """What it frees before it runs."""
        touched = {*self.reads, *self.writes, *self.adds}
        return tuple(i for i in self.frees if i not in touched)


@dataclass(frozen=True)
class Table:
    """One rank's program over its values."""

    rows: tuple[Row, ...]
    values: tuple[Value, ...]

    @property
    def keeps_only_inputs(self) -> bool:
        """Whether no forward leaves anything of its own for a backward, because all is computed again."""
        kinds = (self.values[i].kind for row in self.rows if row.instruction.op is Op.F for i in row.writes)
        return not any(kind.startswith("saved") for kind in kinds)

    def peak(self, kind: str) -> int:
        """The most values of a kind that exist at once."""
        now = most = 0
        for row in self.rows:
            dropped = row.dropped
            now -= sum(self.values[i].kind == kind for i in dropped)
            now += sum(self.values[i].kind == kind for i in row.writes)
            most = max(most, now)
            now -= sum(self.values[i].kind == kind for i in row.frees if i not in dropped)
        return most

    def named(self, ids: Iterable[int]) -> list[str]:
        return [str(self.values[i]) for i in ids]

    def lines(self) -> list[str]:
        """For people: an instruction a line, with `<` before what it reads, `>` writes, `+` adds to, `x` frees."""
        marks = (("<", "reads"), (">", "writes"), ("+", "adds"), ("x", "frees"))
        width = max((len(str(row.instruction)) for row in self.rows), default=0)
        return [
            "  ".join(
                [str(row.instruction).ljust(width)]
                + [f"{mark} {' '.join(self.named(getattr(row, name)))}" for mark, name in marks if getattr(row, name)]
            )
            for row in self.rows
        ]
