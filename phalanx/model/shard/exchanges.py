"""Which exchanges bring a value from how it lies to how it is needed, within a unit and between units.

Every exchange is a pair: what happens to the value in the forward and to its gradient in the backward (see
`sharded.Exchange`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from phalanx.program.shape import Partition

FORWARD = {"sum": "all_reduce", "scatter": "reduce_scatter", "gather": "all_gather", "join": "all_gather",
           "stack": "all_gather"}  # fmt: skip
# What a rank does alone: takes its own part, or multiplies.
LOCAL_FORWARD = {"part": "shard"}
LOCAL_BACKWARD = {"join": "shard", "stack": "shard", "scale": "scale"}
BACKWARD = {"spread": "all_reduce", "scatter": "all_gather", "gather": "reduce_scatter", "part": "all_gather"}


@dataclass(frozen=True)
class Move:
    """One exchange of a value. Along dim 0 it moves samples, along dim 1 tokens."""

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
        yield Move("scatter" if early else "sum", inner_cells(tp, degree), degree, dim=int(early))
        kind = "tokens" if early else "whole"
    if degree != to:
        if kind == "tokens":
            yield Move("join", inner_cells(tp, degree), degree, dim=1)
            kind = "whole"
        yield from _between(value, degree, to, tp)
    cells = inner_cells(tp, to)
    if kind == "whole" and wanted == "tokens":
        yield Move("part", cells, to, dim=1)
    elif kind == "tokens" and wanted == "whole":
        yield Move("gather" if heavy else "join", cells, to, dim=1)
    elif kind == "whole" and heavy and value.differentiable:
        yield Move("spread", cells, to)


def _between(value: Value, degree: int, to: int, tp: int) -> Iterator[Move]:
    """Samples to the ranks that need them; by way of all ranks having all where neither degree divides the other."""
    small, large = sorted((degree, to))
    if large % small:
        yield from _between(value, degree, tp, tp)
        yield from _between(value, tp, to, tp)
    elif not value.has_batch:  # the same for all samples: only its gradient depends on whose they are
        yield (
            Move("spread", between_cells(tp, small, large), to)
            if to < degree
            else Move("scale", (), to, factor=degree / to)
        )
    else:
        yield Move("join" if to > degree else "part", between_cells(tp, small, large), to, dim=0)
