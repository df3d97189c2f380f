"""A rank's place in a plan: its stages, the buckets it holds, and the groups and channels it communicates over.

Everything follows from the plan and the rank's number, so all ranks agree without asking.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.plan.mesh import Mesh
from phalanx.plan.plan import Plan
from phalanx.program.holders import buckets_of, holders, is_tied
from phalanx.program.shape import ModelShape
from phalanx.runtime.accumulate import Reduction
from phalanx.runtime.buckets import Sharding
from phalanx.runtime.links import Channel, Direction, Flow, Group, Links
from phalanx.runtime.model_shape import BucketNames


@dataclass(frozen=True)
class Formation:
    """unused: parameters that no block uses; the ranks of the first stage keep them."""

    plan: Plan
    buckets: BucketNames
    unused: tuple[str, ...]
    rank: int

    @property
    def shape(self) -> ModelShape:
        return self.buckets.shape

    @property
    def mesh(self) -> Mesh:
        return Mesh.of(self.plan)

    @property
    def pp_index(self) -> int:
        return self.mesh.coordinates(self.rank)[0]

    @property
    def dp_index(self) -> int:
        return self.mesh.coordinates(self.rank)[1]

    @property
    def stages(self) -> tuple[int, ...]:
        return self.plan.stages_of(self.pp_index)

    @property
    def first_blocks(self) -> tuple[int, ...]:
        """The first block of every stage, and after the last stage the number of blocks."""
        starts = [self.plan.stage_blocks(stage)[0] for stage in range(self.plan.num_stages)]
        return (*starts, self.shape.num_blocks)

    @property
    def is_first(self) -> bool:
        """Whether this rank holds the first stage."""
        return 0 in self.stages

    @property
    def place(self) -> str:
        """In words, for messages: 'stage 1', 'stages 0, 3', 'stage 1, replica 0'."""
        numbers = ", ".join(map(str, self.stages))
        stages = f"stage {numbers}" if len(self.stages) == 1 else f"stages {numbers}"
        return stages if self.plan.dp == 1 else f"{stages}, replica {self.dp_index}"

    def held(self) -> dict[int, tuple[str, ...]]:
        """The names of the parameters in each bucket that this rank holds."""
        found = {bucket: self.buckets.names[bucket] for bucket in buckets_of(self.plan, self.shape, self.pp_index)}
        if self.unused and self.is_first:
            found[self.shape.num_buckets] = self.unused
        return found

    def owns(self, bucket: int) -> bool:
        """Whether this rank, of all that hold its part of a bucket, is the one that counts."""
        here = bucket == self.shape.num_buckets or self.pp_index == holders(self.plan, self.shape, bucket)[0]
        return here and self.rank == self.mesh.replica_group(self.rank)[0]

    def sharding(self) -> Sharding:
        group = self.mesh.zero_group(self.rank)
        return Sharding(len(group), group.index(self.rank), whole=self.plan.zero < 3)

    def tie_ranks(self, bucket: int, dp_index: int) -> tuple[int, ...]:
        return tuple(self.mesh.rank(pp_index, dp_index) for pp_index in holders(self.plan, self.shape, bucket))


class Connections:
    """The groups and channels of a formation. They are all made here, on every rank in the same order: two ranks that
    waited for each other's next group would wait for ever."""

    def __init__(self, formation: Formation, links: Links) -> None:
        mesh, me = formation.mesh, formation.rank
        plan = formation.plan

        def join(purpose: str, groups: Sequence[tuple[int, ...]]) -> Group:
            mine = links.group((me,))
            for ranks in dict.fromkeys(groups):
                if me in ranks:
                    mine = links.group(ranks, purpose)
            return mine

        self.world = join("world", [mesh.world])
        self.replicas = join("count", [mesh.dp_group(rank) for rank in mesh.world])
        self.gather = join("gather", [mesh.zero_group(rank) for rank in mesh.world] if plan.zero else [])
        reducing = mesh.zero_group if plan.zero else mesh.dp_group
        self._reduce = join("reduce", [reducing(rank) for rank in mesh.world])
        others = mesh.replica_group if plan.zero else (lambda rank: (rank,))
        self._others = join("replicas", [others(rank) for rank in mesh.world])
        self._ties = {
            bucket: join(f"tie{bucket}", [formation.tie_ranks(bucket, dp) for dp in range(plan.dp)])
            for bucket in range(formation.shape.num_blocks, formation.shape.num_buckets)
            if is_tied(plan, formation.shape, bucket)
        }
        self._alone = links.group((me,))
        self._channels = _channels(formation, links)

    def channel(self, source: int, destination: int, direction: Direction) -> Channel:
        return self._channels[source, destination, direction]

    def reduction(self, bucket: int, sharded: bool) -> Reduction:
        return Reduction(self._reduce, self._others, self._ties.get(bucket, self._alone), sharded)

    def is_alone(self, bucket: int) -> bool:
        """Whether nobody else has a gradient for this bucket."""
        return len(self.replicas.ranks) == 1 and bucket not in self._ties


def _channels(formation: Formation, links: Links) -> dict[Flow, Channel]:
    """One for each way between neighbours, forwards and gradients apart: on none of them does anything overtake."""
    plan, mesh, me = formation.plan, formation.mesh, formation.rank
    ways: dict[Flow, None] = {}
    for stage in range(plan.num_stages - 1):
        here, there = plan.pp_index(stage), plan.pp_index(stage + 1)
        for dp in range(plan.dp if here != there else 0):
            first, second = mesh.rank(here, dp), mesh.rank(there, dp)
            ways |= {(first, second, "f"): None, (second, first, "b"): None}
    links.open_channels(ways)
    return {
        (source, destination, direction): links.channel(destination, direction, "out")
        if source == me
        else links.channel(source, direction, "in")
        for source, destination, direction in ways
        if me in (source, destination)
    }
