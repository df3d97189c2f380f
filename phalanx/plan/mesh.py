"""The mesh: the grid of ranks that a plan implies, and the groups of ranks that act together.

Ranks of one tensor-parallel group are consecutive (`tp` is the innermost axis, then `dp`), so that what communicates
most lies inside a node. Nothing is communicated here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from phalanx.plan.plan import Plan


@dataclass(frozen=True)
class Mesh:
    """pp × dp × tp ranks, of which `shards` consecutive ones along dp form a ZeRO group."""

    pp: int
    dp: int
    shards: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        assert min(self.pp, self.dp, self.tp, self.shards) >= 1 and self.dp % self.shards == 0

    @staticmethod
    def of(plan: Plan) -> Mesh:
        return Mesh(plan.pp, plan.dp, plan.shards, plan.tp)

    @property
    def world(self) -> tuple[int, ...]:
        """All ranks."""
        return tuple(range(self.pp * self.dp * self.tp))

    def rank(self, pp_index: int, dp_index: int, tp_index: int = 0) -> int:
        assert 0 <= pp_index < self.pp and 0 <= dp_index < self.dp and 0 <= tp_index < self.tp
        return (pp_index * self.dp + dp_index) * self.tp + tp_index

    def coordinates(self, rank: int) -> tuple[int, int, int]:
        """(pp_index, dp_index, tp_index) of a rank."""
        assert 0 <= rank < self.pp * self.dp * self.tp
        pair, tp_index = divmod(rank, self.tp)
        return (*divmod(pair, self.dp), tp_index)

    def at_stage(self, rank: int, pp_index: int) -> int:
        """The rank at another place of the same pipeline."""
        return self.rank(pp_index, *self.coordinates(rank)[1:])

    def column(self, rank: int) -> tuple[int, ...]:
        """The pipeline of a rank, first to last."""
        return tuple(self.at_stage(rank, pp_index) for pp_index in range(self.pp))

    def tp_group(self, rank: int) -> tuple[int, ...]:
        """The ranks that split the same tensors for the same samples."""
        return self.beside(rank, range(self.tp))

    def beside(self, rank: int, tp_indices: Iterable[int]) -> tuple[int, ...]:
        """Ranks of the same tensor-parallel group."""
        pp_index, dp_index, _ = self.coordinates(rank)
        return tuple(self.rank(pp_index, dp_index, tp_index) for tp_index in tp_indices)

    def dp_group(self, rank: int) -> tuple[int, ...]:
        """The ranks with the same stages and the same part of every tensor."""
        return self._along_dp(rank, range(self.dp))

    def zero_group(self, rank: int) -> tuple[int, ...]:
        """The ranks with the same stages that together hold one copy of what ZeRO shards."""
        _, dp_index, _ = self.coordinates(rank)
        start = dp_index - dp_index % self.shards
        return self._along_dp(rank, range(start, start + self.shards))

    def replica_group(self, rank: int) -> tuple[int, ...]:
        """The ranks with the same stages and the same shard: one of each ZeRO group."""
        _, dp_index, _ = self.coordinates(rank)
        return self._along_dp(rank, range(dp_index % self.shards, self.dp, self.shards))

    def _along_dp(self, rank: int, dp_indices: range) -> tuple[int, ...]:
        pp_index, _, tp_index = self.coordinates(rank)
        first = self.rank(pp_index, 0, tp_index)
        return tuple(first + dp_index * self.tp for dp_index in dp_indices)
