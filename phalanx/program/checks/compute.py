"""Rules about computation on one rank: everything is done once, and nothing before what it needs.

What comes from another rank counts as there once its receive is posted; that it is sent is the messages' concern.
"""

from __future__ import annotations

from phalanx.program.checks.peaks import Level
from phalanx.program.checks.scope import Scope, wait_of
from phalanx.program.instructions import COMPUTE, RECEIVES, SENDS, Instruction, Op

Work = tuple[Op, int, int, int]  # F, B or W, stage, micro-batch, block
PARTS: dict[Op, tuple[Op, ...]] = {Op.F: (Op.F,), Op.B: (Op.B,), Op.W: (Op.W,), Op.BW: (Op.B, Op.W)}


class ComputeRules:
    """`see` and `finish` return what is wrong in words, or nothing."""

    def __init__(self, scope: Scope, rank: int) -> None:
        self._scope, self._rank = scope, rank
        self._stages = scope.stages(rank)
        self._parts = (Op.F, Op.B, Op.W) if scope.training else (Op.F,)
        self._done: set[Work] = set()
        self._posted: set[Instruction] = set()
        self.activations, self.weights_pending, self.buffers = Level(), Level(), Level()

    def see(self, instruction: Instruction) -> str:
        if instruction.op in COMPUTE:
            return self._out_of_place(instruction) or self._compute(instruction)
        if instruction.op in SENDS or instruction.op in RECEIVES:
            return self._out_of_place(instruction) or self._message(instruction)
        return ""

    def finish(self) -> str:
        for stage in self._stages:
            for i in range(self._scope.num_micro_batches):
                for block in self._scope.blocks[stage]:
                    for op in self._parts:
                        if (op, stage, i, block) not in self._done:
                            return f"never runs {Instruction(op, stage, i, block)}"
        return ""

    def _out_of_place(self, it: Instruction) -> str:
        assert it.stage is not None and it.micro_batch is not None
        if it.stage not in self._stages:
            return f"has {it}, but stage {it.stage} is not on this rank (it holds {_listed(self._stages)})"
        if it.micro_batch >= self._scope.num_micro_batches:
            return f"has {it}, but there are {self._scope.num_micro_batches} micro-batches, counted from 0"
        blocks = self._scope.blocks[it.stage]
        if it.op in COMPUTE and it.block not in blocks:
            return f"has {it}, but stage {it.stage} is made of the blocks {blocks[0]} to {blocks[-1]}"
        return ""

    def _compute(self, it: Instruction) -> str:
        assert it.stage is not None and it.micro_batch is not None and it.block is not None
        for op in PARTS[it.op]:
            if op not in self._parts:
                return f"has {it} in an evaluation, which is forward only"
            work = (op, it.stage, it.micro_batch, it.block)
            if work in self._done:
                return f"runs {Instruction(*work)} twice"
            if missing := self._missing(work):
                return f"runs {it} before {missing}"
            self._done.add(work)
        self._account(it.op, it.stage, it.block)
        return ""

    def _missing(self, work: Work) -> str:
        """What the work needs and does not have."""
        op, stage, i, block = work
        needs = [] if op is Op.F else [(Op.F if op is Op.B else Op.B, stage, i, block)]
        if op is not Op.W:
            kind, step = wait_of(op)
            if block != self._scope.first_block(op, stage):
                needs.append((op, stage, i, block + step))
            elif (peer := self._scope.peer(self._rank, stage, step)) is not None:
                receive = Instruction(kind, stage, i, peer=peer)
                if receive not in self._posted:
                    return f"{receive} is posted"
            elif 0 <= stage + step < self._scope.plan.num_stages:
                needs.append((op, stage + step, i, self._scope.last_block(op, stage + step)))
        return next((str(Instruction(*need)) for need in needs if need not in self._done), "")

    def _message(self, it: Instruction) -> str:
        assert it.stage is not None and it.micro_batch is not None
        op = Op.F if it.op in (Op.SEND_F, Op.RECV_F) else Op.B
        step = wait_of(op)[1] if it.op in RECEIVES else -wait_of(op)[1]
        peer = self._scope.peer(self._rank, it.stage, step)
        if peer is None:
            return f"has {it}, but stage {it.stage} has no neighbour on another rank there"
        if it.peer != peer:
            return f"has {it}, but stage {it.stage + step} is on rank {peer}"
        if it in self._posted:
            return f"has {it} twice"
        if it.op in SENDS:
            result = (op, it.stage, it.micro_batch, self._scope.last_block(op, it.stage))
            if result not in self._done:
                return f"has {it} before {Instruction(*result)}"
        else:
            self.buffers.add(1)
        self._posted.add(it)
        return ""

    def _account(self, op: Op, stage: int, block: int) -> None:
        way = Op.F if op is Op.F else Op.B
        if op is not Op.W and block == self._scope.first_block(way, stage):
            received = self._scope.peer(self._rank, stage, wait_of(way)[1]) is not None
            self.buffers.add(-received)
        if block == self._scope.last_block(way, stage):
            self.activations.add({Op.F: 1, Op.B: -1, Op.BW: -1, Op.W: 0}[op])
            self.weights_pending.add({Op.F: 0, Op.B: 1, Op.BW: 0, Op.W: -1}[op])


def _listed(stages: tuple[int, ...]) -> str:
    return f"stage{'s' if len(stages) > 1 else ''} {', '.join(map(str, stages))}"
