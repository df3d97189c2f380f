"""1F1B: each micro-batch's backward as early as possible. Stage s holds the activations of at most pp - s at once."""

from __future__ import annotations

from phalanx.program.instructions import Instruction, Op, Program
from phalanx.program.schedules.merge import alternate


def one_f_one_b(pp: int, v: int, num_micro_batches: int) -> tuple[Program, ...]:
    assert v == 1
    return tuple(_of_stage(stage, pp, num_micro_batches) for stage in range(pp))


def _of_stage(stage: int, pp: int, num_micro_batches: int) -> Program:
    forwards = [Instruction(Op.F, stage, i) for i in range(num_micro_batches)]
    backwards = [[Instruction(Op.BW, stage, i)] for i in range(num_micro_batches)]
    return alternate(forwards, backwards, num_ahead=pp - 1 - stage)
