"""GPipe: all forwards, then all backwards in reverse. Holds the activations of every micro-batch at once."""

from __future__ import annotations

from phalanx.program.instructions import Instruction, Op, Program


def gpipe(num_micro_batches: int) -> Program:
    forwards = (Instruction(Op.F, 0, i) for i in range(num_micro_batches))
    backwards = (Instruction(Op.BW, 0, i) for i in reversed(range(num_micro_batches)))
    return (*forwards, *backwards)
