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

    @property
    def slice(self) -> int | None: ...


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
        if (rank, stage, step) not in self._peers:
            pp_index = self._route.neighbour(stage, step)
            self._peers[rank, stage, step] = None if pp_index is None else self.mesh.at_stage(rank, pp_index)
        return self._peers[rank, stage, step]

    @cached_property
    def _peers(self) -> dict[tuple[int, int, int], int | None]:
        """Those asked for so far: it is asked for every instruction."""
        return {}

    @cached_property
    def halves(self) -> tuple[int | None, ...]:
        """The parts of a micro-batch, as instructions name them."""
        return tuple(range(self.plan.halves)) if self.plan.halves > 1 else (None,)

    def slices(self, micro_batch: int) -> tuple[int | None, ...]:
        """The parts of a micro-batch's tokens, as instructions name them."""
        return tuple(range(self.plan.num_slices(micro_batch))) if self.plan.slices else (None,)

    def blocks_with(self, stage: int, slice: int | None) -> range:
        """The blocks of a stage that run with a slice."""
        return self._later_blocks[stage] if slice else self.blocks[stage]

    @cached_property
    def _later_blocks(self) -> tuple[range, ...]:
        """The blocks of each stage that run with any slice but the first."""
        return tuple(self.shape.blocks_with(1, blocks) for blocks in self.blocks)

    def runs_per_slice(self, block: int) -> bool:
        return bool(self.plan.slices) and block >= self.shape.num_whole_blocks

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
        if peer is None or not self.hands_over(it.stage, way, it.slice):
            return None
        return Instruction(kind, it.stage, it.micro_batch, peer=peer, half=it.half, slice=it.slice)

    def hands_over(self, stage: int, way: int, slice: int | None) -> bool:
        """Whether anything of a slice crosses between a stage and the one before (way = -1) or after it: where blocks
        run once per micro-batch, all of it does with slice 0."""
        return not slice or self.runs_per_slice(self.blocks[min(stage, stage + way)][-1])

    def first_block(self, op: Op, it: Located) -> int:
        """The block with which a stage's forward or backward of a slice begins."""
        assert it.stage is not None
        return self.blocks_with(it.stage, it.slice)[0 if op in FORWARD else -1]

    def last_block(self, op: Op, it: Located) -> int:
        assert it.stage is not None
        return self.blocks_with(it.stage, it.slice)[-1 if op in FORWARD else 0]

    def buckets(self, rank: int) -> tuple[int, ...]:
        return buckets_of(self.plan, self.shape, self.mesh.coordinates(rank)[0])

    def tied(self, rank: int) -> tuple[int, ...]:
        return tuple(bucket for bucket in self.buckets(rank) if is_tied(self.plan, self.shape, bucket))


def wait_of(op: Op) -> tuple[Op, int]:
    """What a forward or backward receives, and how far away in the row of stages that comes from."""
    return (Op.RECV_F, -1) if op in FORWARD else (Op.RECV_B, 1)
