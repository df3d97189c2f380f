"""GPipe: all forwards, then all backwards in reverse. Holds the activations of every micro-batch at once."""

from __future__ import annotations

from phalanx.program.instructions import Instruction, Op, Program


def gpipe(pp: int, v: int, num_micro_batches: int) -> tuple[Program, ...]:
    assert v == 1
    return tuple(_of_stage(stage, num_micro_batches) for stage in range(pp))


def _of_stage(stage: int, num_micro_batches: int) -> Program:
    forwards = (Instruction(Op.F, stage, i) for i in range(num_micro_batches))
    backwards = (Instruction(Op.BW, stage, i) for i in reversed(range(num_micro_batches)))
    return (*forwards, *backwards)
