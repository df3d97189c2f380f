"""What the makers of calls share: the row that is being linked, and where its values lie."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from phalanx.engine.inputs import Inputs
from phalanx.engine.linked import (
    EXTRAS,
    Linked,
    Parts,
    Run,
    Values,
)
from phalanx.engine.reductions import Place, StepRun
from phalanx.engine.trace import Traced
from phalanx.model.graph.blocks import Block
from phalanx.model.segment.segments import Segment
from phalanx.program.instructions import Instruction, Op
from phalanx.program.rules import Names
from phalanx.program.shape import ModelShape
from phalanx.program.values import Row, Value


@dataclass(frozen=True)
class Linking:
    """What is linked: the program of a rank, for micro-batches that look like `inputs`."""

    parts: Parts
    inputs: Mapping[Place, Inputs]
    shape: ModelShape
    names: Names
    linked: Linked


class Maker:
    """Makes the calls of some instructions, row by row."""

    makers: Mapping[Op, Callable[[Instruction], Run]]

    def __init__(self, linking: Linking) -> None:
        self._parts, self._inputs, self._shape = linking.parts, linking.inputs, linking.shape
        self._names, self._linked, self._table = linking.names, linking.linked, linking.linked.table
        self._extra = {name: len(self._table.values) + i for i, name in enumerate(EXTRAS)}
        self._row: Row = self._table.rows[0]

    def make(self, row: Row) -> Run:
        self._row = row
        return self.makers[row.instruction.op](row.instruction)

    def _segment(self, it: Instruction) -> tuple[int, Block, Segment]:
        part = self._parts.graph.part(it)
        assert part.segment is not None
        return part.segment, self._parts.graph.segment(part), self._traced(it).segments[part.segment]

    def _traced(self, it: Instruction) -> Traced:
        return self._parts.tracer(self._inputs[it.micro_batch or 0, it.half or 0], it.slice or 0)

    def _valued(self, ids: Sequence[int], kind: str = "") -> list[tuple[int, Value]]:
        values = self._table.values
        return [(i, values[i]) for i in ids if not kind or values[i].kind == kind]

    def _sums(self) -> list[int]:
        """Of what the row reads, the sums of gradients, without the parts that it adds to one of them first."""
        parts = {part for _, parts in self._row.collects for part in parts}
        return [i for i, v in self._valued(self._row.reads) if v.kind in ("d_parameters", "reduced") and i not in parts]

    def _place(self, kind: str) -> int:
        (place,) = (i for i, _ in self._valued(self._row.reads, kind))
        return place

    def _taken(self) -> dict[str, int]:
        """The gradients that the row takes: what is collected for them is read before."""
        return {v.what: i for i, v in self._valued(self._row.reads, "gradient")}

    def _left(self, kind: str) -> int | None:
        return next((i for i, _ in self._valued(self._row.writes, kind)), None)

    def _read(self, it: Instruction, name: str) -> int:
        if self._names.is_loss(name):
            return self._place("loss")
        name = self._names.activation.get(name, name)
        return next(i for i, v in self._valued(self._row.reads, "activation") if v.what == name)

    def _written(self, it: Instruction, name: str) -> int | None:
        if self._names.is_loss(name):
            return self._left("loss")
        return next((i for i, v in self._valued(self._row.writes, "activation") if v.what == name), None)

    def _scale(self, dtype: torch.dtype) -> Callable[[Values], None]:
        items, place, totals = self._place("items"), self._extra["d_loss"], self._parts.totals
        assert totals is not None

        def scale(values: Values) -> None:
            if values[place] is None or values[place].dtype != dtype:  # the same for all micro-batches of a step
                values[place] = totals.scale(values[items]).to(dtype)

        return scale


def block_of(it: Instruction) -> int:
    assert it.block is not None
    return it.block


def part_of(it: Instruction) -> tuple[int, int]:
    """Of a bucket's state."""
    assert it.op_index is not None
    return block_of(it), it.op_index


def unscaled(values: Values) -> None:
    """Of what does not put the loss out."""


def nothing(values: Values, step: StepRun) -> None:
    """Where nothing is trained there is nothing to do."""
