"""Computation replaced by waits of known length, so that more ranks can be measured than there are processors.

Everything else is real: the program, the engine, and every message and collective with tensors of their true sizes.
What is computed is zeros, and no weight gets a gradient of its own: nothing is learned.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from phalanx.engine.engine import Engine
from phalanx.model.segment.segments import Call
from phalanx.program.instructions import Op

Durations = Mapping[Op, tuple[float, ...]]  # seconds of F, A, B, W and BW, per block or segment
_SPIN_SECONDS = 3e-4  # what sleeping may be late by


def replace_compute(engine: Engine, durations: Durations) -> None:
    """From now on the engine waits where it would compute."""
    device = engine.compute.device

    def stand_in(op: Op, number: int, call: Call) -> Callable[..., Any]:
        seconds = durations[op][number]

        def wait(*arguments: Any) -> list[Any]:
            until = time.perf_counter() + seconds
            looks = ((None if r is None else (r.shape, r.dtype)) for r in call.results)
            zeros = [None if look is None else torch.zeros(look[0], dtype=look[1], device=device) for look in looks]
            wait_until(until)
            return zeros

        return wait

    engine.stand_in(stand_in)


def wait_until(moment: float) -> None:
    """Sleeps, and spins at the end: sleeping alone is not exact enough."""
    time.sleep(max(0.0, moment - time.perf_counter() - _SPIN_SECONDS))
    while time.perf_counter() < moment:
        pass
