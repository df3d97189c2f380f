"""How a value lies across the ranks of a unit's tensor-parallel group.

Whole: every rank has all of it. Tokens: each has some tokens of it (the sequence split). Split: each has ranges of one
other dim. Partial: each has a summand. Stacked: each has a part that is to be stacked with those of the others.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from phalanx.model.shard.cuts import Cuts


@dataclass(frozen=True)
class Origin:
    """Where a split began: index i of the split dim is element `offset + i * unit` of the cut dim of `weight`."""

    product: Any  # the node that began it
    weight: Any  # its parameter
    offset: int = 0
    unit: int = 1


@dataclass(frozen=True)
class Placement:
    kind: str
    dim: int = -1
    cuts: Cuts = ()
    origin: Origin | None = None

    @property
    def is_heavy(self) -> bool:
        """Whether ranks compute different things: their gradients towards what is whole are summands."""
        return self.kind in ("split", "partial", "stacked")

    def moved(self, dim: int) -> Placement:
        return replace(self, dim=dim)

    def scaled(self, dim: int, times: int = 1, by: int = 1) -> Placement:
        """Indices multiplied by `times` and divided by `by`, which must divide them."""
        assert self.origin is not None
        cuts = tuple(tuple((a * times // by, b * times // by) for a, b in ranges) for ranges in self.cuts)
        unit = self.origin.unit * by
        assert unit % times == 0
        return replace(self, dim=dim, cuts=cuts, origin=replace(self.origin, unit=unit // times))

    def same_as(self, other: Placement) -> bool:
        return (self.kind, self.dim, self.cuts) == (other.kind, other.dim, other.cuts)


WHOLE = Placement("whole")
PARTIAL = Placement("partial")
STACKED = Placement("stacked")
TOKENS = Placement("tokens", 1)  # of [samples, tokens, features]


class Conflict(Exception):
    """A value cannot lie as its users need it; the products that began these splits are done whole instead."""

    def __init__(self, reason: str, *placements: Placement) -> None:
        super().__init__(reason)
        self.origins = [p.origin for p in placements if p.origin is not None]


class Refined(Exception):
    """A cut has become more exact; everything is placed again."""
