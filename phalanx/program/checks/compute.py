"""Rules about computation on one rank: everything is done once, and nothing before what it needs.

Slices of a micro-batch go forward in order and backward in reverse. Exchanges between the steps of a block count as
computation here: they stand in the same order. What comes from another
rank counts as there once its receive is posted; that it is sent is the messages' concern.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from phalanx.program.checks.peaks import Level
from phalanx.program.checks.scope import FORWARD, Scope, wait_of
from phalanx.program.instructions import HALVES, RECEIVES, SENDS, Instruction, Op
from phalanx.program.visits import in_visits


class Work(NamedTuple):
    """A part of a computation: what BW does is two of them."""

    op: Op
    stage: int
    micro_batch: int
    slice: int | None
    half: int | None
    block: int
    step: int | None

    def __str__(self) -> str:
        return str(Instruction(**self._asdict()))


class ComputeRules:
    """`see` and `finish` return what is wrong in words, or nothing."""

    def __init__(self, scope: Scope, rank: int) -> None:
        self._scope, self._rank = scope, rank
        self._stages = scope.stages(rank)
        self._done: set[Work] = set()
        self._posted: set[Instruction] = set()
        self._unused: set[Instruction] = set()  # receives that no computation has taken yet
        self.activations, self.weights_pending, self.buffers = Level(), Level(), Level()

    def see(self, instruction: Instruction) -> str:
        if in_visits(instruction):
            return self._out_of_place(instruction) or self._compute(instruction)
        if instruction.op in SENDS or instruction.op in RECEIVES:
            return self._out_of_place(instruction) or self._message(instruction)
        return ""

    def finish(self) -> str:
        for stage in self._stages:
            for i in range(self._scope.num_micro_batches):
                for slice in self._scope.slices(i):
                    for work in self._of_visit(stage, i, slice):
                        if work not in self._done:
                            return f"never runs {work}"
        return ""

    def _of_visit(self, stage: int, micro_batch: int, slice: int | None) -> Iterator[Work]:
        for block in self._scope.blocks_with(stage, slice):
            for half in self._scope.halves:
                for op, step in self._scope.pieces[block].needs:
                    yield Work(op, stage, micro_batch, slice, half, block, step)

    def _out_of_place(self, it: Instruction) -> str:
        assert it.stage is not None and it.micro_batch is not None
        if it.stage not in self._stages:
            return f"has {it}, but stage {it.stage} is not on this rank (it holds {_listed(self._stages)})"
        if it.micro_batch >= self._scope.num_micro_batches:
            return f"has {it}, but there are {self._scope.num_micro_batches} micro-batches, counted from 0"
        if it.half not in self._scope.halves:
            cut = "whole" if self._scope.halves == (None,) else f"cut into the halves {' and '.join(HALVES)}"
            return f"has {it}, but micro-batches are {cut} under this plan"
        if it.slice not in (slices := self._scope.slices(it.micro_batch)):
            cut = "is not cut into slices" if slices == (None,) else f"has the slices 0 to {slices[-1]}"
            return f"has {it}, but micro-batch {it.micro_batch} {cut} under this plan"
        blocks = self._scope.blocks[it.stage]
        if in_visits(it) and it.block not in blocks:
            return f"has {it}, but stage {it.stage} is made of the blocks {blocks[0]} to {blocks[-1]}"
        if in_visits(it) and it.block not in self._scope.blocks_with(it.stage, it.slice):
            return f"has {it}, but block {it.block} runs once per micro-batch, with slice 0"
        return ""

    def _compute(self, it: Instruction) -> str:
        assert it.stage is not None and it.micro_batch is not None and it.block is not None
        for op in (Op.B, Op.W) if it.op is Op.BW else (it.op,):
            if not self._scope.training and op not in FORWARD:
                return f"has {it} in an evaluation, which is forward only"
            work = Work(op, it.stage, it.micro_batch, it.slice, it.half, it.block, it.step)
            if (op, it.step) not in self._scope.pieces[it.block].needs:
                return f"has {it}, for which block {it.block} has no step under this plan"
            if work in self._done:
                return f"runs {work} twice"
            if missing := self._missing(work):
                return f"runs {it} before {missing}"
            self._done.add(work)
        self._account(it)
        return ""

    def _missing(self, work: Work) -> str:
        """What the work needs and does not have."""
        pieces = self._scope.pieces[work.block]
        piece = (work.op, work.step)
        if piece in pieces.first and work.block == self._scope.first_block(work.op, work):
            receive = self._scope.receive_of(self._rank, work.op, work)
            if receive is not None and receive not in self._posted:
                return f"{receive} is posted"
        needs = [work._replace(op=op, step=step) for op, step in pieces.needs[piece]]
        needs += self._of_neighbour(work) if piece in pieces.first else []
        needs += self._of_other_slice(work)
        return next((str(need) for need in needs if need not in self._done), "")

    def _of_neighbour(self, work: Work) -> Iterator[Work]:
        """What the first pieces of a block wait for: the block before or after, on the same rank."""
        _, way = wait_of(work.op)
        block, stage = work.block + way, work.stage
        if work.block == self._scope.first_block(work.op, work):
            stage += way
            if stage not in self._stages or not self._scope.hands_over(work.stage, way, work.slice):
                return
        pieces = self._scope.pieces[block]
        for op, step in pieces.forward_end if work.op in FORWARD else pieces.backward_end:
            yield work._replace(op=op, stage=stage, block=block, step=step)

    def _of_other_slice(self, work: Work) -> Iterator[Work]:
        """A forward reads what the slices before it have left in the past, a backward what later ones added to it."""
        if work.op not in (Op.F, Op.B) or work.slice is None or not self._scope.runs_per_slice(work.block):
            return
        other = work.slice + wait_of(work.op)[1]
        if other in self._scope.slices(work.micro_batch):
            yield work._replace(slice=other)

    def _message(self, it: Instruction) -> str:
        assert it.stage is not None and it.micro_batch is not None
        op = Op.F if it.op in (Op.SEND_F, Op.RECV_F) else Op.B
        way = wait_of(op)[1] if it.op in RECEIVES else -wait_of(op)[1]
        peer = self._scope.peer(self._rank, it.stage, way)
        if peer is None:
            return f"has {it}, but stage {it.stage} has no neighbour on another rank there"
        if not self._scope.hands_over(it.stage, way, it.slice):
            return f"has {it}, but what crosses there belongs to the micro-batch and goes with slice 0"
        if it.peer != peer:
            return f"has {it}, but stage {it.stage + way} is on rank {peer}"
        if it in self._posted:
            return f"has {it} twice"
        self._posted.add(it)
        if it.op in SENDS:
            return next((f"has {it} before {work}" for work in self._sent(op, it) if work not in self._done), "")
        self._unused.add(it)
        self.buffers.add(1)
        return ""

    def _sent(self, op: Op, it: Instruction) -> Iterator[Work]:
        """What must be done before a stage's results are sent."""
        assert it.stage is not None and it.micro_batch is not None
        block = self._scope.last_block(op, it)
        pieces = self._scope.pieces[block]
        for kind, step in pieces.forward_end if op is Op.F else pieces.backward_end:
            yield Work(kind, it.stage, it.micro_batch, it.slice, it.half, block, step)

    def _account(self, it: Instruction) -> None:
        op, block = it.op, it.block
        assert block is not None
        if op in (Op.A, Op.CA):
            return
        receive = self._scope.receive_of(self._rank, op, it) if op is not Op.W else None
        if receive in self._unused:
            self._unused.remove(receive)
            self.buffers.add(-1)
        pieces = self._scope.pieces[block]
        _, end = pieces.forward_end[0] if op in FORWARD else pieces.backward_end[0]
        if block == self._scope.last_block(op, it) and it.step == end:
            self.activations.add({Op.B: -1, Op.BW: -1, Op.W: 0}.get(op, 1))
            self.weights_pending.add({Op.B: 1, Op.W: -1}.get(op, 0))


def _listed(stages: tuple[int, ...]) -> str:
    return f"stage{'s' if len(stages) > 1 else ''} {', '.join(map(str, stages))}"
