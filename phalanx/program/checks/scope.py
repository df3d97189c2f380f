"""What the rules of checking have in common: where everything belongs, and how a broken rule is told."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from phalanx.plan.mesh import Mesh
from phalanx.plan.plan import Plan
from phalanx.program.block_steps import BlockSteps
from phalanx.program.checks.pieces import BlockPieces, pieces_of
from phalanx.program.holders import buckets_of, is_tied
from phalanx.program.instructions import Instruction, Op
from phalanx.program.passes.messages import Route
from phalanx.program.shape import ModelShape

FORWARD = frozenset((Op.F, Op.CF))


class Located(Protocol):
    """Anything with a place in the schedule."""

    @property
    def stage(self) -> int | None: ...

    @property
    def micro_batch(self) -> int | None: ...

    @property
    def half(self) -> int | None: ...


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
        return None if pp_index is None else self.mesh.at_stage(rank, pp_index)

    @cached_property
    def halves(self) -> tuple[int | None, ...]:
        """The parts of a micro-batch, as instructions name them."""
        return tuple(range(self.plan.halves)) if self.plan.halves > 1 else (None,)

    @cached_property
    def pieces(self) -> tuple[BlockPieces, ...]:
        """What is to be done for each block of the model."""
        steps = (BlockSteps.of(self.plan, self.shape, block) for block in range(self.shape.num_blocks))
        known: dict[BlockSteps, BlockPieces] = {}
        return tuple(known.setdefault(block, pieces_of(block, self.training)) for block in steps)

    def receive_of(self, rank: int, op: Op, it: Located) -> Instruction | None:
        """The receive that a forward or backward of a stage waits for, where that comes from another rank."""
        assert it.stage is not None
        kind, way = wait_of(op)
        peer = self.peer(rank, it.stage, way)
        return None if peer is None else Instruction(kind, it.stage, it.micro_batch, peer=peer, half=it.half)

    def first_block(self, op: Op, stage: int) -> int:
        """The block with which a stage's forward or backward begins."""
        return self.blocks[stage][0 if op in FORWARD else -1]

    def last_block(self, op: Op, stage: int) -> int:
        return self.blocks[stage][-1 if op in FORWARD else 0]

    def buckets(self, rank: int) -> tuple[int, ...]:
        return buckets_of(self.plan, self.shape, self.mesh.coordinates(rank)[0])

    def tied(self, rank: int) -> tuple[int, ...]:
        return tuple(bucket for bucket in self.buckets(rank) if is_tied(self.plan, self.shape, bucket))


def wait_of(op: Op) -> tuple[Op, int]:
    """What a forward or backward receives, and how far away in the row of stages that comes from."""
    return (Op.RECV_F, -1) if op in FORWARD else (Op.RECV_B, 1)
