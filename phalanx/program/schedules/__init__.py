"""The orders in which the ranks of a pipeline may run their stages and micro-batches; each is one short file.

A schedule is a pure function (pp, v, number of micro-batches) → one program in the short view per rank of the pipeline.
Those that can order slices take the number of them in each micro-batch besides.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from phalanx.plan import rules
from phalanx.program.instructions import Program

Schedule = Callable[..., tuple[Program, ...]]


def _order(name: str) -> Schedule:
    module, _, function = rules.SCHEDULES[name].order.partition(".")
    return getattr(import_module(f"{__name__}.{module}"), function)


SCHEDULES: dict[str, Schedule] = {name: _order(name) for name in rules.SCHEDULES}
