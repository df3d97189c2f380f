"""The orders in which the ranks of a pipeline may run their stages and micro-batches; each is one short file.

A schedule is a pure function (pp, v, number of micro-batches) → one program in the short view per rank of the pipeline.
Those that can order slices take the number of them in each micro-batch besides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from phalanx.program.instructions import Program
from phalanx.program.schedules.gpipe import gpipe
from phalanx.program.schedules.interleaved import interleaved
from phalanx.program.schedules.one_f_one_b import eager_one_f_one_b, one_f_one_b
from phalanx.program.schedules.zb_h1 import zb_h1
from phalanx.program.schedules.zb_v import zb_v

Schedule = Callable[[int, int, int], tuple[Program, ...]]
SlicedSchedule = Callable[[int, int, int, Sequence[int]], tuple[Program, ...]]

SCHEDULES: dict[str, Schedule] = {
    "1f1b": one_f_one_b,
    "eager-1f1b": eager_one_f_one_b,
    "gpipe": gpipe,
    "interleaved": interleaved,
    "zb-h1": zb_h1,
    "zb-v": zb_v,
}
SLICED: dict[str, SlicedSchedule] = {
    "1f1b": one_f_one_b,
    "eager-1f1b": eager_one_f_one_b,
    "gpipe": gpipe,
    "zb-h1": zb_h1,
}
