"""1F1B: each micro-batch's backward as early as possible. One stage holds one micro-batch's activations."""

from __future__ import annotations

from phalanx.program.instructions import Instruction, Op, Program


def one_f_one_b(num_micro_batches: int) -> Program:
    return tuple(Instruction(op, 0, i) for i in range(num_micro_batches) for op in (Op.F, Op.BW))
