"""Which collectives a wire depends on: through exchanges that send nothing, values and gradients pass without a trace.

About all blocks of a model together, since a wire may cross them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container

from phalanx.program.shape import ModelShape, Step


class Wires:
    """The exchanges of a model, by what they read and write."""

    def __init__(self, shape: ModelShape) -> None:
        self._maker: dict[str, tuple[int, Step]] = {}  # with its block
        self._takers: defaultdict[str, list[Step]] = defaultdict(list)
        for block, steps in enumerate(shape.steps):
            for step in steps:
                if step.kind == "exchange":
                    self._maker[step.writes[0]] = block, step
                    self._takers[step.reads[0]].append(step)

    def source(self, wire: str, blocks: Container[int] | None = None) -> str | None:
        """What a wire is made of without communication: that is done when it is first read. None: it is not made so, or
        not by one of these blocks."""
        block, step = self._maker.get(wire, (-1, None))
        if step is None or step.forward or not (blocks is None or block in blocks):
            return None
        return step.reads[0]

    def origin(self, wire: str) -> str:
        """The wire that a segment or a collective wrote, of which this one is made."""
        while (source := self.source(wire)) is not None:
            wire = source
        return wire

    def returning(self, wire: str) -> tuple[str, ...]:
        """The wires whose gradients come back to this one by a collective."""
        found: list[str] = []
        for step in self._takers[wire]:
            found += step.writes if step.backward else self.returning(step.writes[0])
        return tuple(found)
