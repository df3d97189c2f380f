"""Where a micro-batch's tokens are cut, and how many samples it has, so that a step of a pipeline is shortest.

The dynamic programme of TeraPipe, exact and vectorised: of all slicings the one with the least sum of times plus
(stages − 1) × the slowest slice. What a slice takes is the caller's knowledge, measured or modelled; nothing runs here.

The sum is the step itself when all forwards run before all backwards on equal stages. In 1F1B order it is so for one
micro-batch, or where all slices take the same time; otherwise forwards meet backwards of other lengths, and the step
lies between this sum and (slices + stages − 1) × the slowest slice: a few percent above the sum where starting a slice
costs something, more where it does not and the grain is coarse.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from phalanx.errors import PlanError

Times = NDArray[np.float64]  # [grains of a slice, grains before it]; inf: not allowed. Row 0 is not used
NUM_BOUNDS = 64  # tried at once: the dynamic programme takes about as long for 64 bounds as for 8
EXACT = 1 - 1e-12  # a bound that promises less than rounding could have made is not worth trying


@dataclass(frozen=True)
class ModelledTimes:
    """Seconds of a slice, forward and backward: `start` + `per_token` × tokens + `per_pair` × pairs of attention.

    smallest: tokens; a shorter slice takes as long as one of so many tokens without a past, because starting the work
    then takes longer than the work. Only a past long enough makes it slower.
    """

    start: float
    per_token: float
    per_pair: float
    smallest: float

    def seconds(self, tokens: Times, past: Times) -> Times:
        """A token attends to the whole past and, on average, to half of its slice."""
        work = self.start + self.per_token * tokens + self.per_pair * tokens * (past + tokens / 2)
        return np.maximum(work, self.least_seconds)

    @property
    def least_seconds(self) -> float:
        """No slice takes less."""
        return self.start + self.per_token * self.smallest + self.per_pair * self.smallest**2 / 2

    def table(self, tokens: int, grain: int) -> Times:
        """Times of all slices that begin and end at multiples of `grain`."""
        if tokens % grain:
            below = tokens // grain * grain
            raise PlanError(
                f"slices: {tokens} tokens are not a multiple of the grain of {grain} tokens",
                f"use a grain that divides {tokens}, or {below or below + grain} tokens",
            )
        slices, pasts = grain * np.arange(tokens // grain + 1)[:, None], grain * np.arange(tokens // grain)
        times = self.seconds(slices.astype(np.float64), pasts.astype(np.float64))
        return np.where(slices + pasts <= tokens, times, np.inf)


@dataclass(frozen=True)
class Slicing:
    """lengths: tokens of each slice. seconds: the step; slowest: the slice that takes longest."""

    lengths: tuple[int, ...]
    seconds: float
    slowest: float


@dataclass(frozen=True)
class Part:
    """A micro-batch: its number of samples and the tokens of each of its slices."""

    num_samples: int
    lengths: tuple[int, ...]


@dataclass(frozen=True)
class BatchSlicing:
    """The micro-batches of a step, larger ones first."""

    parts: tuple[Part, ...]
    seconds: float
    slowest: float


def step_seconds(slices: Sequence[float], num_stages: int) -> float:
    """A step, given what each slice of all its micro-batches takes on one stage, forward and backward."""
    return sum(slices) + (num_stages - 1) * max(slices)


def slice_seconds(times: Times, grains: Sequence[int]) -> tuple[float, ...]:
    """What the slices of one micro-batch take, in order."""
    return tuple(float(times[n, past]) for n, past in zip(grains, accumulate(grains, initial=0)))


def plan_slices(times: Times, num_stages: int, grain: int = 1) -> Slicing:
    """The best slicing of one micro-batch. grain: tokens of a grain, the unit of `times` and of every cut."""
    batch = plan_batch({1: times}, 1, num_stages, grain)
    return Slicing(batch.parts[0].lengths, batch.seconds, batch.slowest)


def plan_batch(times: Mapping[int, Times], num_samples: int, num_stages: int, grain: int = 1) -> BatchSlicing:
    """The best way to cut `num_samples` samples into micro-batches and each of these into slices, chosen together.

    times: of slices, for each size that a micro-batch may have. With one size only, all micro-batches are equal.
    """
    assert num_stages >= 1 and num_samples >= 1 and grain >= 1 and all(size >= 1 for size in times)
    assert all(table.ndim == 2 and table.shape[0] == table.shape[1] + 1 for table in times.values())
    ends = {size: _by_end(table) for size, table in times.items()}
    levels = np.unique(np.concatenate([table[np.isfinite(table)] for table in ends.values()]))
    bound = _best_bound(levels, lambda bounds: _batch_sums(ends, num_samples, bounds)[-1], num_stages)
    if bound is None:
        raise _impossible(times, num_samples, grain)
    sizes = sorted(_sizes(ends, num_samples, bound), reverse=True)
    grains = {size: _backtrack(ends[size], bound) for size in set(sizes)}
    seconds = [second for size in sizes for second in slice_seconds(times[size], grains[size])]
    parts = tuple(Part(size, tuple(n * grain for n in grains[size])) for size in sizes)
    return BatchSlicing(parts, step_seconds(seconds, num_stages), max(seconds))


def _best_bound(levels: Times, least_sums: Callable[[Times], Times], num_stages: int) -> float | None:
    """The allowed time of a slice with which the step is shortest; None where no bound allows any slicing.

    A larger bound never makes the least sum larger. So the sum under a bound that was tried is a limit from below for
    all smaller bounds, and most need not be tried.
    """
    sums = np.full(len(levels), np.nan)
    left = np.arange(len(levels))  # bounds that may still turn out best
    while len(left):
        tried = left[np.unique(np.linspace(0, len(left) - 1, NUM_BOUNDS).astype(int))]
        sums[tried] = least_sums(levels[tried])
        best = np.nanmin(sums + (num_stages - 1) * levels)
        known = np.flatnonzero(~np.isnan(sums))  # has the largest level, since `left` began with all
        place = np.searchsorted(known, left)
        above, below = sums[known[place]], np.where(place > 0, sums[known[place - 1]], np.inf)
        promise = above + (num_stages - 1) * levels[left]
        left = left[np.isnan(sums[left]) & (above < below) & (promise < best * EXACT)]
    steps = sums + (num_stages - 1) * levels
    return float(levels[np.nanargmin(steps)]) if np.isfinite(sums).any() else None


def _by_end(times: Times) -> Times:
    """[end, start]: the time of the slice between two places, inf where it would end before it starts."""
    num_grains = times.shape[1]
    ends = np.full((num_grains + 1, num_grains), np.inf)
    end, start = np.tril_indices(num_grains + 1, -1, num_grains)
    ends[end, start] = times[end - start, start]
    return ends


def _least_sums(ends: Times, bounds: Times) -> Times:
    """[end, bound]: the least sum of times of slices up to `end` of which none takes longer than the bound."""
    num_grains = ends.shape[1]
    sums = np.full((num_grains + 1, len(bounds)), np.inf)
    sums[0] = 0.0
    possible = ends <= bounds.max()
    first = possible.argmax(axis=1)  # starts before this one are not allowed under any bound
    for end in np.flatnonzero(possible.any(axis=1)):
        own = ends[end, first[end] : end, None]
        candidates = sums[first[end] : end] + own
        np.putmask(candidates, own > bounds, np.inf)
        sums[end] = candidates.min(axis=0)
    return sums


def _batch_sums(ends: Mapping[int, Times], num_samples: int, bounds: Times) -> Times:
    """[samples, bound]: the least sum of times of micro-batches that together have so many samples."""
    own = {size: _least_sums(table, bounds)[-1] for size, table in ends.items()}
    sums = np.full((num_samples + 1, len(bounds)), np.inf)
    sums[0] = 0.0
    for samples in range(1, num_samples + 1):
        for size, least in own.items():
            if size <= samples:
                np.minimum(sums[samples], sums[samples - size] + least, out=sums[samples])
    return sums


def _sizes(ends: Mapping[int, Times], num_samples: int, bound: float) -> Iterable[int]:
    """The micro-batches that have the least sum under the bound."""
    bounds = np.array([bound])
    own = {size: float(_least_sums(table, bounds)[-1, 0]) for size, table in ends.items()}
    sums = _batch_sums(ends, num_samples, bounds)[:, 0]
    while num_samples:
        left = num_samples
        size = min((size for size in own if size <= left), key=lambda size: sums[left - size] + own[size])
        yield size
        num_samples -= size


def _backtrack(ends: Times, bound: float) -> tuple[int, ...]:
    """The slicing that has the least sum under the bound, in grains."""
    sums = _least_sums(ends, np.array([bound]))[:, 0]
    grains: list[int] = []
    end = ends.shape[1]
    while end:
        allowed = np.where(ends[end, :end] <= bound, ends[end, :end], np.inf)
        start = int(np.argmin(sums[:end] + allowed))
        grains.append(end - start)
        end = start
    return tuple(reversed(grains))


def _impossible(times: Mapping[int, Times], num_samples: int, grain: int) -> PlanError:
    sizes = ", ".join(str(size) for size in sorted(times))
    tokens = ", ".join(str(n) for n in sorted({table.shape[1] * grain for table in times.values()}))
    return PlanError(
        f"slices: {num_samples} samples of {tokens} tokens cannot be cut into micro-batches of {sizes} samples and "
        f"slices of a multiple of {grain} tokens: no such cut has only slices that are allowed",
        "allow longer slices (more memory, or recompute), a finer grain, or other sizes of a micro-batch",
    )
