"""The mesh: the grid of ranks that a plan implies, and the groups of ranks that act together.

Ranks of one pipeline stage are consecutive (`dp` is the inner axis), so ZeRO groups lie inside a node. Nothing is
communicated here.
"""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.plan.plan import Plan


@dataclass(frozen=True)
class Mesh:
    """pp × dp ranks, of which `shards` consecutive ones along dp form a ZeRO group."""

    pp: int
    dp: int
    shards: int = 1

    def __post_init__(self) -> None:
        assert self.pp >= 1 and self.dp >= 1 and self.shards >= 1 and self.dp % self.shards == 0

    @staticmethod
    def of(plan: Plan) -> Mesh:
        return Mesh(plan.pp, plan.dp, plan.shards)

    @property
    def world(self) -> tuple[int, ...]:
        """All ranks."""
        return tuple(range(self.pp * self.dp))

    def rank(self, pp_index: int, dp_index: int) -> int:
        assert 0 <= pp_index < self.pp and 0 <= dp_index < self.dp
        return pp_index * self.dp + dp_index

    def coordinates(self, rank: int) -> tuple[int, int]:
        """(pp_index, dp_index) of a rank."""
        assert 0 <= rank < self.pp * self.dp
        return divmod(rank, self.dp)

    def column(self, rank: int) -> tuple[int, ...]:
        """The pipeline of a rank, first to last."""
        _, dp_index = self.coordinates(rank)
        return tuple(self.rank(pp_index, dp_index) for pp_index in range(self.pp))

    def dp_group(self, rank: int) -> tuple[int, ...]:
        """The ranks with the same stages."""
        return self._along_dp(rank, range(self.dp))

    def zero_group(self, rank: int) -> tuple[int, ...]:
        """The ranks with the same stages that together hold one copy of what ZeRO shards."""
        _, dp_index = self.coordinates(rank)
        start = dp_index - dp_index % self.shards
        return self._along_dp(rank, range(start, start + self.shards))

    def replica_group(self, rank: int) -> tuple[int, ...]:
        """The ranks with the same stages and the same shard: one of each ZeRO group."""
        _, dp_index = self.coordinates(rank)
        return self._along_dp(rank, range(dp_index % self.shards, self.dp, self.shards))

    def _along_dp(self, rank: int, dp_indices: range) -> tuple[int, ...]:
        pp_index, _ = self.coordinates(rank)
        return tuple(self.rank(pp_index, dp_index) for dp_index in dp_indices)
