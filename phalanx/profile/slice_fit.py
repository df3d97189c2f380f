"""How long a slice takes with so much past before it: measured over a grid, then fitted by a model with four numbers.

The fit says how far it is from what was measured, and the device's smallest efficient slice: below it a shorter slice
no longer gets cheaper. A report adds what would be planned, with equal stages and free messages, so that a step is what
`planning/slice_search.py` adds up. How a slice is run is the caller's knowledge (`slice_run.py`).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from phalanx.errors import PlanError
from phalanx.plan.fields import write_slicings
from phalanx.planning.slice_search import ModelledTimes, Slicing, Times, plan_slices

SHORTEST = 8  # tokens
REPEATS = 5
ROUNDS = 20  # of telling flat from sloped points apart; it settles after a few

Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class Measurement:
    """One slice, forward and backward, with `past` tokens of its sequence before it."""

    tokens: int
    past: int
    seconds: float


@dataclass(frozen=True)
class Fit:
    """error: root mean square of the relative errors. worst: the measurement that is farthest from the model."""

    times: ModelledTimes
    error: float
    worst: Measurement
    worst_error: float

    @property
    def smallest(self) -> int:
        """The smallest efficient slice in tokens: a shorter one takes as long."""
        return math.ceil(round(self.times.smallest, 6))


def grid(tokens: int, shortest: int = SHORTEST) -> tuple[tuple[int, int], ...]:
    """(slice, past) in tokens: lengths two per octave, each without a past and with some that fit the sequence."""
    if tokens < 4 * shortest:
        raise PlanError(
            f"slices: a sequence of {tokens} tokens is too short to measure slices from {shortest} tokens on",
            f"use sequences of {4 * shortest} tokens or more",
        )
    octaves = range(int(math.log2(tokens / shortest)) + 1)
    lengths = {shortest * 2**k * part // 2 for k in octaves for part in (2, 3)} | {tokens}
    fitting = sorted(length for length in lengths if length <= tokens)
    return tuple(
        (length, past)
        for length in fitting
        for past in sorted({0, tokens // 4, tokens // 2, tokens - length})
        if past <= tokens - length
    )


def measure(
    run: Callable[[int, int], float], tokens: int, shortest: int = SHORTEST, repeats: int = REPEATS
) -> tuple[Measurement, ...]:
    """Medians over `repeats` of what `run(slice, past)` says, for slices of a sequence of `tokens` tokens.

    Slices take turns, so that drift of the machine hits all alike; the first round warms up and does not count.
    """
    points = grid(tokens, shortest)
    rounds = [[run(*point) for point in points] for _ in range(repeats + 1)][1:]
    medians = [statistics.median(seconds) for seconds in zip(*rounds)]
    return tuple(Measurement(*point, seconds) for point, seconds in zip(points, medians))


def fit(measurements: Iterable[Measurement]) -> Fit:
    """The model with the least squares of relative errors.

    Which measurements lie on the flat part is not known beforehand: every length is tried as its end.
    """
    points = tuple(measurements)
    tokens, past, seconds = (
        np.array(column, float) for column in zip(*((p.tokens, p.past, p.seconds) for p in points))
    )
    assert len(set(tokens.tolist())) >= 2 and seconds.min() > 0, (
        "a fit needs slices of several lengths, and their times"
    )
    models = [_settled(tokens, past, seconds, tokens < end) for end in np.unique(tokens)]
    errors = [(model.seconds(tokens, past) - seconds) / seconds for model in models]
    squares = [float(np.mean(error**2)) for error in errors]
    best = squares.index(min(squares))
    worst = int(np.argmax(np.abs(errors[best])))
    return Fit(models[best], math.sqrt(squares[best]), points[worst], float(errors[best][worst]))


def planned_by_depth(times: Times, depths: Iterable[int], grain: int = 1) -> dict[int, Slicing]:
    """What would be planned for pipelines of so many equal stages: does the best slice depend on the depth?"""
    return {depth: plan_slices(times, depth, grain) for depth in depths}


def _settled(tokens: Times, past: Times, seconds: Times, flat: Mask) -> ModelledTimes:
    """Fits the flat and the sloped part in turn with deciding which points belong to which."""
    for _ in range(ROUNDS):
        model = _with_flat(tokens, past, seconds, flat)
        now_flat = model.seconds(tokens, past) <= model.least_seconds
        if (now_flat == flat).all() or now_flat.all():
            break
        flat = now_flat
    return model


def _with_flat(tokens: Times, past: Times, seconds: Times, flat: Mask) -> ModelledTimes:
    slope = ~flat
    start, per_token, per_pair = _line(tokens[slope], past[slope], seconds[slope])
    smallest = tokens.min()  # nothing is known of shorter ones
    if flat.any():
        weights = 1 / seconds[flat] ** 2
        level = float(np.average(seconds[flat], weights=weights))
        smallest = max(smallest, _crossing(level - start, per_token, per_pair, tokens.max()))
    return ModelledTimes(start, per_token, per_pair, float(smallest))


def _line(tokens: Times, past: Times, seconds: Times) -> tuple[float, float, float]:
    """Start, per token and per pair, of which noise must make none negative but the start.

    A start below zero only says that the flat part ends late: no slice is ever that short.
    """
    columns = np.stack([np.ones_like(tokens), tokens, tokens * (past + tokens / 2)], axis=1) / seconds[:, None]
    scale = np.abs(columns).max(axis=0)  # pairs are millions of tokens: without it their part would be cut as rounding
    used = [0, 1, 2]
    found = np.zeros(3)
    while True:
        found[:] = 0.0
        found[used] = np.linalg.lstsq(columns[:, used] / scale[used], np.ones(len(tokens)), rcond=None)[0] / scale[used]
        negative = [i for i in used if i > 0 and found[i] < 0]
        if not negative:
            return float(found[0]), float(found[1]), float(found[2])
        used.remove(negative[-1])


def _crossing(height: float, per_token: float, per_pair: float, longest: float) -> float:
    """How many tokens without a past the line needs to climb by `height`, at most the longest slice measured."""
    height = max(height, 0.0)
    climb = per_token + math.sqrt(per_token**2 + 2 * per_pair * height)
    return min(2 * height / climb, longest) if climb else longest


RUNS = 3
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
    measurements = measure(run, tokens, shortest, RUNS)
    found = fit(measurements)
    two = fit(measure(run_two, tokens, shortest, RUNS)) if run_two else None
    return SliceReport(tokens, measurements, found, two, depths_of(found.times, tokens, {*DEPTHS, stages}))


def depths_of(times: ModelledTimes, tokens: int, depths: Iterable[int]) -> tuple[Depth, ...]:
    """Lengths are relative, so tokens beyond the last whole grain are shared by all slices."""
    grain = max(1, tokens // NUM_GRAINS)
    table = times.table(tokens // grain * grain, grain)
    whole = float(table[-1, 0])
    planned = planned_by_depth(table, sorted(depths), grain)
    return tuple(Depth(k, slicing.lengths, k * whole / slicing.seconds) for k, slicing in planned.items())
