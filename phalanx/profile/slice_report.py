"""What a slice profile says of a model on a device: the fit, the smallest efficient slice, and what would be planned.

Stages are taken to be equal and messages free, so a step is what `plan/slices.py` adds up. Nothing is run here: the
measuring functions are the caller's (`slice_run.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from phalanx.plan.slices import ModelledTimes
from phalanx.plan.slicing import write_slicings
from phalanx.profile.slices import SHORTEST, Fit, Measurement, fit, measure, planned_by_depth

REPEATS = 3
DEPTHS = (2, 4, 8, 16, 32, 64)  # stages for which it is shown what would be planned
NUM_LENGTHS, NUM_GRAINS = 128, 128  # the shortest slice that is measured, and the unit of cuts, are so small a part

Run = Callable[[int, int], float]  # tokens, past → seconds


@dataclass(frozen=True)
class Depth:
    """What would be planned for so many stages. speed_up: over a step without slices."""

    stages: int
    lengths: tuple[int, ...]
    speed_up: float

    @property
    def text(self) -> str:
        """As a plan has it; '' where slices do not help."""
        return f"slices={write_slicings((self.lengths,))}" if len(self.lengths) > 1 else ""


@dataclass(frozen=True)
class SliceReport:
    """fit: of one layer. fit_of_two: of two layers of one stage, None where the model has only one."""

    tokens: int
    measurements: tuple[Measurement, ...]
    fit: Fit
    fit_of_two: Fit | None
    depths: tuple[Depth, ...]

    def depth(self, stages: int) -> Depth:
        return next(depth for depth in self.depths if depth.stages == stages)


def report(run: Run, run_two: Run | None, tokens: int, stages: int) -> SliceReport:
    """Measures slices of sequences of `tokens` tokens, of one layer and of two."""
    shortest = max(SHORTEST, tokens // NUM_LENGTHS)
    measurements = measure(run, tokens, shortest, REPEATS)
    found = fit(measurements)
    two = fit(measure(run_two, tokens, shortest, REPEATS)) if run_two else None
    return SliceReport(tokens, measurements, found, two, depths_of(found.times, tokens, {*DEPTHS, stages}))


def depths_of(times: ModelledTimes, tokens: int, depths: Iterable[int]) -> tuple[Depth, ...]:
    """Lengths are relative, so tokens beyond the last whole grain are shared by all slices."""
    grain = max(1, tokens // NUM_GRAINS)
    table = times.table(tokens // grain * grain, grain)
    whole = float(table[-1, 0])
    planned = planned_by_depth(table, sorted(depths), grain)
    return tuple(Depth(k, slicing.lengths, k * whole / slicing.seconds) for k, slicing in planned.items())
