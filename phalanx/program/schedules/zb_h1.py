"""ZB-H1: 1F1B with the gradients of inputs (B) apart from those of weights (W), in 1F1B's memory.

Upstream stages wait for B only. Stage s holds W back by s micro-batches, which fills the gaps that 1F1B leaves at the
end: with equal times for F, B and W a third of its bubble remains. Slices take turns as in 1F1B; their weight
gradients wait in the order of the backward.
"""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.program.instructions import Op, Program
from phalanx.program.schedules.one_f_one_b import most_held
from phalanx.program.schedules.parts import Part, alternate, backwards, forwards, parts_of


def zb_h1(pp: int, v: int, num_micro_batches: int, num_slices: Sequence[int] = ()) -> tuple[Program, ...]:
    assert v == 1
    parts = parts_of(num_micro_batches, num_slices)
    return tuple(_of_stage(parts, stage, most_held("zb-h1", pp, stage, num_slices)) for stage in range(pp))


def _of_stage(parts: Sequence[Sequence[Part]], stage: int, most: int) -> Program:
    both = backwards(stage, parts)
    weights = [it._replace(op=Op.W) for it in both]
    groups = [[it._replace(op=Op.B), *weights[max(0, i - stage) : max(0, i - stage + 1)]] for i, it in enumerate(both)]
    late = max(0, len(both) - stage)
    return (*alternate(forwards(stage, parts), groups, num_ahead=most - 1), *weights[late:])
