"""ZB-H1: input gradients and weight gradients as separate instructions, in 1F1B's order and memory."""

from __future__ import annotations

from phalanx.program.instructions import Instruction, Op, Program


def zero_bubble(num_micro_batches: int) -> Program:
    return tuple(Instruction(op, 0, i) for i in range(num_micro_batches) for op in (Op.F, Op.B, Op.W))
