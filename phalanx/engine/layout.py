"""A rank's place in a plan: its stages, what it keeps of parameters, the groups and channels it communicates over.

Everything follows from the plan and the rank's number, so all ranks agree without asking.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from phalanx.comm.links import Channel, Direction, Flow, Group, Links
from phalanx.engine.gradients import Reduction
from phalanx.engine.inputs import SampleShard
from phalanx.model.shard.sharded import Sharded
from phalanx.params.layout_of import StateLayout
from phalanx.params.state_facts import StateFacts
from phalanx.plan.mesh import Mesh
from phalanx.plan.plan import Plan
from phalanx.program.holders import holders, is_tied
from phalanx.program.shape import ModelShape, Partition
from phalanx.state.local import Local


@dataclass(frozen=True)
class RankLayout:
    """shape: of the program. facts: about the state of the model. sharded: the model as this rank's tensor-parallel
    group splits it, where the plan has one."""

    plan: Plan
    shape: ModelShape
    facts: StateFacts
    rank: int
    sharded: Sharded | None = None

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
    def tp_index(self) -> int:
        return self.mesh.coordinates(self.rank)[2]

    @property
    def is_tp_leader(self) -> bool:
        """Whether this rank counts what every rank of its tensor-parallel group knows alike, such as the loss."""
        return self.tp_index == 0

    @property
    def stages(self) -> tuple[int, ...]:
        return self.plan.stages_of(self.pp_index)

    @property
    def is_first(self) -> bool:
        """Whether this rank holds the first stage."""
        return 0 in self.stages

    @property
    def place(self) -> str:
        """In words, for messages: 'stage 1', 'stages 0, 3', 'stage 1, replica 0, tensor part 1'."""
        numbers = ", ".join(map(str, self.stages))
        stages = f"stage {numbers}" if len(self.stages) == 1 else f"stages {numbers}"
        replica = f", replica {self.dp_index}" if self.plan.dp > 1 else ""
        return stages + replica + (f", tensor part {self.tp_index}" if self.plan.tp > 1 else "")

    @cached_property
    def state(self) -> StateLayout:
        """What every rank keeps of the model's state."""
        return StateLayout(self.plan, self.facts)

    def locals(self) -> dict[str, Local]:
        """What lies here of each parameter of the model."""
        return {each.name: each.local(self.tp_index) for each in self.facts.parameters}

    @cached_property
    def owned(self) -> frozenset[str]:
        """The parameters of which this rank, of all that hold the same piece, is the one that counts."""
        return self.state.owned(self.rank)

    def cell(self, cells: Partition, rank: int) -> tuple[int, ...]:
        """The ranks in one cell of its tensor-parallel group with `rank`, in the cell's order."""
        index = self.mesh.coordinates(rank)[2]
        return self.mesh.beside(rank, next((cell for cell in cells if index in cell), (index,)))

    def sample_shards(self) -> dict[int, SampleShard]:
        """By tensor degree, the samples of a micro-batch that its units see here where those are not all."""
        tp = self.plan.tp
        parts = [part for block in self.sharded.parts for part in block] if self.sharded else []
        return {d: SampleShard(self.tp_index // d, tp // d) for d in sorted({part.degree for part in parts}) if d < tp}

    def tie_ranks(self, bucket: int, rank: int) -> tuple[int, ...]:
        """The ranks of a pipeline that hold a bucket."""
        return tuple(self.mesh.at_stage(rank, pp_index) for pp_index in holders(self.plan, self.shape, bucket))


class ProcessGroups:
    """The groups and channels of a formation, of one generation. They are all made here, on every rank in the same
    order: two ranks that waited for each other's next group would wait for ever. owns_links: whether it closes them."""

    def __init__(self, formation: RankLayout, links: Links, owns_links: bool = False) -> None:
        self.links, self.owns_links = links, owns_links
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
        self._shape = formation.shape
        self._sums = {
            cells: tuple(join(purpose, groups) for purpose, groups in _summing(formation, cells).items())
            for cells in dict.fromkeys([(), *formation.shape.sums])
        }
        self._redistributions = {
            cells: join("tp", [formation.cell(cells, rank) for rank in mesh.world])
            for cells in _redistributed(formation.sharded)
        }
        self._ties = {
            bucket: join(f"tie{bucket}", [formation.tie_ranks(bucket, rank) for rank in mesh.world])
            for bucket in range(formation.shape.num_blocks, formation.shape.num_buckets)
            if is_tied(plan, formation.shape, bucket)
        }
        self._alone = links.group((me,))
        self._channels = _channels(formation, links)

    def close(self) -> None:
        if self.owns_links:
            self.links.close()

    def ends(self) -> Iterator[Group | Channel]:
        """All groups and channels."""
        yield from (self.world, self.replicas, self.gather, self._alone, *self._redistributions.values())
        yield from (group for groups in self._sums.values() for group in groups)
        yield from (*self._ties.values(), *self._channels.values())

    def channel(self, source: int, destination: int, direction: Direction) -> Channel:
        return self._channels[source, destination, direction]

    def redistribution_group(self, cells: Partition) -> Group:
        """The ranks with which this one carries out a redistribution."""
        return self._redistributions[cells]

    def reduction(self, bucket: int, sharded: bool) -> Reduction:
        zero, replicas = self._sums[self._shape.cells(bucket)]
        return Reduction(zero, replicas, self._ties.get(bucket, self._alone), sharded)

    def is_alone(self, bucket: int) -> bool:
        """Whether nobody else has a gradient for this bucket, on any rank of a tensor-parallel group."""
        return len(self.replicas.ranks) == 1 and bucket not in self._ties and not self._shape.cells(bucket)


def _redistributed(sharded: Sharded | None) -> list[Partition]:
    """Every partition that some redistribution runs over, in an order that all ranks agree on."""
    parts = [part for block in sharded.parts for part in block] if sharded else []
    return list(dict.fromkeys(part.redistribution.cells for part in parts if part.redistribution is not None))


def _summing(formation: RankLayout, cells: Partition) -> dict[str, list[tuple[int, ...]]]:
    """The groups of all ranks over which gradients are summed one after the other: with ZeRO they are scattered first,
    so that only a shard travels further."""
    mesh = formation.mesh

    def across(along: Callable[[int], tuple[int, ...]]) -> list[tuple[int, ...]]:
        return [tuple(sorted(r for same in formation.cell(cells, rank) for r in along(same))) for rank in mesh.world]

    if formation.plan.zero:
        return {"reduce": [mesh.zero_group(rank) for rank in mesh.world], "replicas": across(mesh.replica_group)}
    return {"reduce": across(mesh.dp_group), "replicas": []}


def _channels(formation: RankLayout, links: Links) -> dict[Flow, Channel]:
    """One for each way between neighbours, forwards and gradients apart: on none of them does anything overtake."""
    plan, mesh, me = formation.plan, formation.mesh, formation.rank
    ways: dict[Flow, None] = {}
    for stage in range(plan.num_stages - 1):
        here, there = plan.pp_index(stage), plan.pp_index(stage + 1)
        for rank in mesh.world if here != there else ():
            first, second = mesh.at_stage(rank, here), mesh.at_stage(rank, there)
            ways |= {(first, second, "f"): None, (second, first, "b"): None}
    links.open_channels(ways)
    return {
        (source, destination, direction): links.channel(destination, direction, "out")
        if source == me
        else links.channel(source, direction, "in")
        for source, destination, direction in ways
        if me in (source, destination)
    }
