"""The orders in which a stage may run its micro-batches; each is one short file."""

from __future__ import annotations

from collections.abc import Callable

from phalanx.program.instructions import Program
from phalanx.program.schedules.gpipe import gpipe
from phalanx.program.schedules.one_f_one_b import one_f_one_b
from phalanx.program.schedules.zero_bubble import zero_bubble

SCHEDULES: dict[str, Callable[[int], Program]] = {"1f1b": one_f_one_b, "gpipe": gpipe, "zb-h1": zero_bubble}
