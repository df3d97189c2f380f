"""Interleaved 1F1B: each rank holds v stages, dealt out in rounds, which divides the bubble of 1F1B by v.

Micro-batches travel in groups: a group passes all stages before the next one begins. No group is smaller than pp, or
its first micro-batch would come round again before the rank is done with its last: all of them have between pp and
2 pp - 1, so that any number of micro-batches has the same bubble (tests hold this), not only multiples of pp.
"""

from __future__ import annotations

from itertools import pairwise

from phalanx.program.instructions import Instruction, Op, Program
from phalanx.program.schedules.parts import alternate


def interleaved(pp: int, v: int, num_micro_batches: int) -> tuple[Program, ...]:
    groups = _groups(pp, num_micro_batches)
    return tuple(_of_rank(pp_index, pp, v, groups) for pp_index in range(pp))


def _of_rank(pp_index: int, pp: int, v: int, groups: list[range]) -> Program:
    stages = [pp_index + round * pp for round in range(v)]
    forwards = [Instruction(Op.F, stage, i) for group in groups for stage in stages for i in group]
    backwards = [[Instruction(Op.BW, stage, i)] for group in groups for stage in reversed(stages) for i in group]
    # The first group on all rounds but the last, and the way of its first micro-batch to the last rank and back.
    num_ahead = (v - 1) * len(groups[0]) + 2 * (pp - 1 - pp_index)
    return alternate(forwards, backwards, num_ahead)


def _groups(pp: int, num_micro_batches: int) -> list[range]:
    """As many groups as can have pp micro-batches each, as equal as possible, larger ones first."""
    num_groups = max(1, num_micro_batches // pp)
    size, extra = divmod(num_micro_batches, num_groups)
    begins = [g * size + min(g, extra) for g in range(num_groups + 1)]
    return [range(begin, end) for begin, end in pairwise(begins)]
