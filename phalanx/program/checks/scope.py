"""What the rules of checking have in common: where everything belongs, and how a broken rule is told."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from phalanx.plan.mesh import Mesh
from phalanx.plan.plan import Plan
from phalanx.program.holders import buckets_of, is_tied
from phalanx.program.instructions import Op
from phalanx.program.passes.messages import Route
from phalanx.program.shape import ModelShape


class Broken(Exception):
    """A rule is broken at a place: a position in a rank's program, or its end where something is missing."""

    def __init__(self, words: str, rank: int, position: int | None = None) -> None:
        super().__init__(words)
        self.words, self.rank, self.position = words, rank, position


@dataclass(frozen=True)
class Scope:
    """A plan on a model, for a training step or for an evaluation."""

    plan: Plan
    shape: ModelShape
    num_micro_batches: int
    training: bool

    @cached_property
    def mesh(self) -> Mesh:
        return Mesh.of(self.plan)

    @cached_property
    def blocks(self) -> tuple[range, ...]:
        """The blocks of each stage."""
        return tuple(self.plan.stage_blocks(stage) for stage in range(self.plan.num_stages))

    @cached_property
    def _route(self) -> Route:
        return Route(self.plan.num_stages, self.plan.pp_index)

    def stages(self, rank: int) -> tuple[int, ...]:
        return self.plan.stages_of(self.mesh.coordinates(rank)[0])

    def peer(self, rank: int, stage: int, step: int) -> int | None:
        """The rank that holds the stage `step` further on in the same pipeline, where that is another one."""
        pp_index = self._route.neighbour(stage, step)
        return None if pp_index is None else self.mesh.rank(pp_index, self.mesh.coordinates(rank)[1])

    def first_block(self, op: Op, stage: int) -> int:
        """The block with which a stage's forward or backward begins."""
        return self.blocks[stage][0 if op is Op.F else -1]

    def last_block(self, op: Op, stage: int) -> int:
        return self.blocks[stage][-1 if op is Op.F else 0]

    def buckets(self, rank: int) -> tuple[int, ...]:
        return buckets_of(self.plan, self.shape, self.mesh.coordinates(rank)[0])

    def tied(self, rank: int) -> tuple[int, ...]:
        return tuple(bucket for bucket in self.buckets(rank) if is_tied(self.plan, self.shape, bucket))


def wait_of(op: Op) -> tuple[Op, int]:
    """What a forward (F) or backward (B) receives, and how far away in the row of stages that comes from."""
    return (Op.RECV_F, -1) if op is Op.F else (Op.RECV_B, 1)
