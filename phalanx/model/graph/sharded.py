"""A model as one rank of a tensor-parallel group sees it: local segments, the exchanges that join them, and what of
every parameter lies here. `shard.py` makes it; the runtime runs it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from phalanx.model.graph.blocks import Blocks
from phalanx.model.graph.expressions import evaluate
from phalanx.program.shape import Partition, Step
from phalanx.state.local import Local


@dataclass(frozen=True)
class Exchange:
    """A wire re-placed into another one. `cells`: the tp indices that take part, as a partition of all of them.

    kind                forward                                   backward
    sum                 all-reduce                                the same gradient
    spread              the same value                            all-reduce
    scatter             reduce-scatter along dim                  all-gather along dim
    gather              all-gather along dim                      reduce-scatter along dim
    join                all-gather along dim                      this rank's part
    part                this rank's part along dim                all-gather along dim
    stack               all-gather along a new first dim          this rank's part
    scale               the same value                            the gradient times `factor`

    Parts along a dim are of equal size; the last ones are padded with zeros where `size` is not a multiple of them.
    """

    kind: str
    source: str
    target: str
    cells: Partition
    dim: int = 0
    size: str = ""  # expression over the micro-batch's dims: how long `dim` is without padding; "": parts divide it
    factor: float = 1.0

    def shape_after(self, before: Sequence[int], dims: Mapping[str, int]) -> tuple[int, ...]:
        """What it makes of the shape of a wire."""
        shape, count = list(before), max((len(cell) for cell in self.cells), default=1)
        match self.kind:
            case "scatter" | "part":
                shape[self.dim] = -(-shape[self.dim] // count)
            case "gather" | "join":
                shape[self.dim] = evaluate(self.size, dims) if self.size else shape[self.dim] * count
            case "stack":
                shape = [count, *shape]
            case _:
                pass
        return tuple(shape)


@dataclass(frozen=True)
class Part:
    """A step of a block as the runtime sees it: a segment (a number into `Sharded.blocks.blocks`) or an exchange."""

    segment: int | None = None
    exchange: Exchange | None = None
    degree: int = 1


@dataclass(frozen=True)
class LocalParameter:
    """locals: what of a parameter lies at each tp index; `index` is this rank's. sums: cells of tp indices over which
    its gradient must be summed."""

    locals: tuple[Local, ...]
    index: int
    sums: Partition

    @property
    def local(self) -> Local:
        """What lies here."""
        return self.locals[self.index]

    @property
    def holders(self) -> Partition:
        """Cells of tp indices that keep the same part."""
        found: dict[Local, tuple[int, ...]] = {}
        for index, local in enumerate(self.locals):
            found[local] = (*found.get(local, ()), index)
        return tuple(found.values())


@dataclass(frozen=True)
class Sharded:
    """blocks: every segment is one of its blocks. parts[b]: the steps of the model's block b, like `steps[b]`."""

    blocks: Blocks
    parts: tuple[tuple[Part, ...], ...]
    steps: tuple[tuple[Step, ...], ...]
    parameters: Mapping[str, LocalParameter]
    replicated: tuple[str, ...]  # what no rule could split, in words, for the user
