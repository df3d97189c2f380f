"""A model as one rank of a tensor-parallel group sees it: local segments, the redistributions that join them, and what
of every parameter lies here. `shard.py` makes it; the runtime runs it.

Also which redistributions bring a value from how it lies to how it is needed, within a unit and between units. Every
redistribution is a pair: what happens to the value in the forward and to its gradient in the backward.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from phalanx.expressions import evaluate
from phalanx.model.graph.blocks import Blocks
from phalanx.program.shape import BlockOp, Partition
from phalanx.state.local import Local


@dataclass(frozen=True)
class Redistribution:
    """An activation re-placed into another one. `cells`: the tp indices that take part, as a partition of all of them.

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
        """What it makes of the shape of an activation."""
        shape, count = list(before), max((len(cell) for cell in self.cells), default=1)
        match self.kind:
            case "reduce_scatter" | "shard":
                shape[self.dim] = -(-shape[self.dim] // count)
            case "all_gather" | "unshard":
                shape[self.dim] = evaluate(self.size, dims) if self.size else shape[self.dim] * count
            case "stack":
                shape = [count, *shape]
            case _:
                pass
        return tuple(shape)


@dataclass(frozen=True)
class Part:
    """An op of a block as the runtime sees it: a segment (a number into `Sharded.blocks.blocks`) or a
    redistribution."""

    segment: int | None = None
    redistribution: Redistribution | None = None
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
    """blocks: every segment is one of its blocks. parts[b]: the ops of the model's block b, like `ops[b]`."""

    blocks: Blocks
    parts: tuple[tuple[Part, ...], ...]
    ops: tuple[tuple[BlockOp, ...], ...]
    parameters: Mapping[str, LocalParameter]
    replicated: tuple[str, ...]  # what no rule could split, in words, for the user


FORWARD = {"all_reduce": "all_reduce", "reduce_scatter": "reduce_scatter", "all_gather": "all_gather", "unshard": "all_gather",
           "stack": "all_gather"}  # fmt: skip
# What a rank does alone: takes its own part, or multiplies.
LOCAL_FORWARD = {"shard": "shard"}
LOCAL_BACKWARD = {"unshard": "shard", "stack": "shard", "scale": "scale"}
BACKWARD = {"identity": "all_reduce", "reduce_scatter": "all_gather", "all_gather": "reduce_scatter", "shard": "all_gather"}


@dataclass(frozen=True)
class Move:
    """One redistribution of a value. Along dim 0 it moves samples, along dim 1 tokens."""

    kind: str
    cells: Partition
    degree: int  # of the result
    dim: int = 0
    factor: float = 1.0


@dataclass(frozen=True)
class Value:
    """What matters of a value: whether it holds samples and tokens, and whether a gradient flows to it."""

    has_batch: bool
    has_tokens: bool
    differentiable: bool


def inner_cells(tp: int, degree: int) -> Partition:
    """The ranks that split a unit's tensors for the same samples."""
    return tuple(tuple(range(start, start + degree)) for start in range(0, tp, degree))


def between_cells(tp: int, small: int, large: int) -> Partition:
    """The ranks that together have, in order, the samples of one rank of the larger degree: one of each part."""
    return tuple(
        tuple(start + inner + part * small for part in range(large // small))
        for start in range(0, tp, large)
        for inner in range(small)
    )


def moves(value: Value, kind: str, degree: int, wanted: str, to: int, heavy: bool, tp: int) -> Iterator[Move]:
    """From a placement kind at one degree to another at another. heavy: ranks will compute different things with it."""
    if kind == "stacked":
        yield Move("stack", inner_cells(tp, degree), degree)
        return
    if kind == "partial":
        early = value.has_tokens and (wanted == "tokens" or heavy) and degree == to
        yield Move("reduce_scatter" if early else "all_reduce", inner_cells(tp, degree), degree, dim=int(early))
        kind = "tokens" if early else "whole"
    if degree != to:
        if kind == "tokens":
            yield Move("unshard", inner_cells(tp, degree), degree, dim=1)
            kind = "whole"
        yield from _between(value, degree, to, tp)
    cells = inner_cells(tp, to)
    if kind == "whole" and wanted == "tokens":
        yield Move("shard", cells, to, dim=1)
    elif kind == "tokens" and wanted == "whole":
        yield Move("all_gather" if heavy else "unshard", cells, to, dim=1)
    elif kind == "whole" and heavy and value.differentiable:
        yield Move("identity", cells, to)


def _between(value: Value, degree: int, to: int, tp: int) -> Iterator[Move]:
    """Samples to the ranks that need them; by way of all ranks having all where neither degree divides the other."""
    small, large = sorted((degree, to))
    if large % small:
        yield from _between(value, degree, tp, tp)
        yield from _between(value, tp, to, tp)
    elif not value.has_batch:  # the same for all samples: only its gradient depends on whose they are
        yield (
            Move("identity", between_cells(tp, small, large), to)
            if to < degree
            else Move("scale", (), to, factor=degree / to)
        )
    else:
        yield Move("unshard" if to > degree else "shard", between_cells(tp, small, large), to, dim=0)
