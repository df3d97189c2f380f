"""ZB-H1: 1F1B with the gradients of inputs (B) apart from those of weights (W), in 1F1B's memory.

Upstream stages wait for B only. Stage s holds W back by s micro-batches, which fills the gaps that 1F1B leaves at the
end: with equal times for F, B and W a third of its bubble remains.
"""

from __future__ import annotations

from phalanx.program.instructions import Instruction, Op, Program
from phalanx.program.schedules.merge import alternate


def zb_h1(pp: int, v: int, num_micro_batches: int) -> tuple[Program, ...]:
    assert v == 1
    return tuple(_of_stage(stage, pp, num_micro_batches) for stage in range(pp))


def _of_stage(stage: int, pp: int, num_micro_batches: int) -> Program:
    forwards = [Instruction(Op.F, stage, i) for i in range(num_micro_batches)]
    weights = [Instruction(Op.W, stage, i) for i in range(num_micro_batches)]
    late = max(0, num_micro_batches - stage)
    backwards = [
        [Instruction(Op.B, stage, i), *weights[max(0, i - stage) : max(0, i - stage + 1)]]
        for i in range(num_micro_batches)
    ]
    return (*alternate(forwards, backwards, num_ahead=pp - 1 - stage), *weights[late:])
