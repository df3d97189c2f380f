"""Fits what software reaches of devices to runs that were measured: least squares of the logarithms of step times.

Few numbers, all of `Software`, each held near what is usual unless runs say otherwise; no number belongs to a model or
a row. Pure mathematics on runs, and the file that keeps what was fitted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from itertools import product
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from phalanx.errors import ConfigError, nearest
from phalanx.planning.cost import Software, machines
from phalanx.planning.estimate import estimate, parts_of
from phalanx.planning.runs import Run

Numbers = NDArray[np.float64]

# What is fitted, and how far from what is usual it may be found easily, in logarithms (of shares: of the odds). What
# hardware decides is known well, what programs overlap hardly at all.
FITTED = {
    "products": 1.0, "attention": 1.0, "small": 1.0, "odd": 1.5, "passes": 0.7, "between": 0.7,
    "scores": 0.7, "launch": 2.0, "call": 1.0, "link": 1.0, "network": 1.0, "link_latency": 1.5, "network_latency": 1.5,
    "behind_weights": 2.0, "hidden": 3.0, "messages": 2.0, "contention": 0.7,
    "step": 2.0, "micro_batch": 2.0,
}  # fmt: skip
SHARES = ("products", "attention", "odd", "link", "network", "behind_weights", "hidden")  # at most 1
PULL = 0.01  # so much error in the time of all runs counts as a number that is as far off as it easily is
ALIKE = 0.01  # of runs that are told to fit or not to
GRADIENTS, LOGITS = (2.0, 4.0), (0.0, 8.0, 16.0, 24.0, 32.0)  # bytes that programs may take
STEPS = 25
NEAR = 0.05  # an error of a step time, in logarithms, that is not large


def step_seconds(run: Run, software: Software) -> float:
    samples = -(-run.batch // (run.plan.dp * run.plan.mb))
    places = machines(run.cluster, software, run.plan, samples)
    return sum(parts_of(run.work, run.plan, places, run.loads).values())


def fit(runs: Sequence[Run], start: Software | None = None) -> Software:
    """To the runs that were timed. start: what is usual."""
    timed = [run for run in runs if run.seconds]
    software = start or Software(micro_batch=1e-3)
    usual = _numbers(software)
    measured = np.log([run.seconds or 1.0 for run in timed])
    numbers, damping = usual.copy(), 1e-2
    error = _residuals(timed, measured, numbers, usual, software)
    for _ in range(STEPS):
        slopes = _slopes(lambda tried: _residuals(timed, measured, tried, usual, software), numbers, error)
        while damping < 1e6:
            tried = _moved(numbers, slopes, error, damping)
            new = _residuals(timed, measured, tried, usual, software)
            if new @ new < error @ error:
                break
            damping *= 4
        else:
            break
        better = 1 - (new @ new) / (error @ error)
        numbers, error, damping = tried, new, max(damping / 8, 1e-6)
        if better < 1e-5:
            break
    return _software(numbers, software)


def _slopes(residuals: Callable[[Numbers], Numbers], numbers: Numbers, error: Numbers) -> Numbers:
    """[residuals, numbers]. error: the residuals of `numbers`."""
    units = np.eye(len(numbers))
    return np.stack([(residuals(numbers + 1e-4 * unit) - error) / 1e-4 for unit in units], axis=1)


def _moved(numbers: Numbers, slopes: Numbers, error: Numbers, damping: float) -> Numbers:
    normal = slopes.T @ slopes
    move = np.linalg.solve(normal + damping * np.diag(np.diag(normal) + 1e-9), -slopes.T @ error)
    return numbers + np.clip(move, -1.0, 1.0)


def _residuals(
    runs: Sequence[Run], measured: Numbers, numbers: Numbers, usual: Numbers,
    software: Software,
) -> Numbers:  # fmt: skip
    """Of each run, of equal weight whatever their number; and how far numbers are from usual ones."""
    tried = _software(numbers, software)
    predicted = np.log([step_seconds(run, tried) for run in runs])
    return np.concatenate([
        _robust(predicted - measured) / math.sqrt(len(runs)),
        PULL * (numbers - usual) / np.array(list(FITTED.values())),
    ])  # fmt: skip


def _robust(errors: Numbers) -> Numbers:
    """Numbers whose squares grow like those of small errors and like large errors themselves: a few runs that nothing
    explains do not pull everything their way."""
    return np.sign(errors) * NEAR * np.sqrt(2 * (np.sqrt(1 + (errors / NEAR) ** 2) - 1))


def _numbers(software: Software) -> Numbers:
    """Of shares the logarithm of the odds, so that they stay below 1; of others the logarithm."""
    return np.array([_open(name, getattr(software, name)) for name in FITTED])


def _open(name: str, value: float) -> float:
    value = max(value, 1e-9)
    return math.log(value / (1 - min(value, 0.999))) if name in SHARES else math.log(value)


def _software(numbers: Numbers, software: Software) -> Software:
    found = {}
    for name, number in zip(FITTED, numbers, strict=True):
        clipped = float(np.clip(number, -25, 25))
        found[name] = 1 / (1 + math.exp(-clipped)) if name in SHARES else math.exp(clipped)
    return replace(software, **found)


def fit_memory(runs: Sequence[Run], software: Software) -> Software:
    """In how many bytes gradients are summed, how many of a logit every tensor-parallel rank has whole, and how much of
    a device's memory is not for plans: what tells most runs that fitted from those that did not."""
    if len({run.seconds is None for run in runs}) < 2:
        return software
    found: list[tuple[int, Software]] = []
    for gradient, logits in product(GRADIENTS, LOGITS):
        tried = replace(software, gradient=gradient, logits=logits, slack=0.0)
        limit, right = _divide(sorted((_filled(run, tried), run.seconds is not None) for run in runs))
        found.append((right, replace(tried, slack=1 - limit)))
    # Of what tells about as many rightly, the most careful: runs with few logits say little about them.
    least = max(right for right, _ in found) - ALIKE * len(runs)
    return max((own for own in found if own[0] >= least), key=lambda own: (own[1].logits, own[0]))[1]


def _divide(shares: Sequence[tuple[float, bool]]) -> tuple[float, int]:
    """The limit that tells most runs rightly, in the middle between two of them, and how many. shares: in order."""
    ran = sum(fits for _, fits in shares)
    right, best = len(shares) - ran, (0.0, len(shares) - ran)
    for place, (share, fits) in enumerate(shares):
        right += 1 if fits else -1
        following = shares[place + 1][0] if place + 1 < len(shares) else share
        best = max(best, ((share + following) / 2, right), key=lambda pair: pair[1])
    return min(best[0], 1.0), best[1]


def _filled(run: Run, software: Software) -> float:
    """Of a device's memory, by the place in the pipeline that needs most."""
    own = estimate(run.work, run.plan, run.cluster, software, run.batch)
    return own.peak_bytes / own.budget[own.fullest]


NAMES = tuple(field.name for field in fields(Software))
# What seconds are divided by, of which there is always some.
RATES = ("products", "attention", "odd", "memory", "link", "network", "gathers", "sends", "network_gathers",
         "network_sends", "crowded", "host_updates", "host_copies")  # fmt: skip


def read_software(mapping: Mapping[str, Any], device: str) -> Software:
    """Of the section about a device; a ConfigError where there is none, or it holds something else."""
    sections = mapping.get("devices")
    if not isinstance(sections, dict) or not sections:
        raise ConfigError("holds no `devices`", "write it with `phalanx calibrate RUNS.csv --out FILE`")
    known = cast(dict[str, Any], sections)
    if device not in known:
        message = f"is about {', '.join(known)}, and the cluster has {device}"
        raise ConfigError(message, "calibrate with runs on that device, or leave the calibration out")
    shares = known[device].get("software") if isinstance(known[device], dict) else None
    if not isinstance(shares, dict):
        raise ConfigError(
            f"devices: {device} has no `software`", "write it with `phalanx calibrate RUNS.csv --out FILE`"
        )
    given = cast(dict[str, Any], shares)
    for name, value in given.items():
        if name not in NAMES:
            raise ConfigError(f"devices: {device}: unknown share {name!r}", nearest(name, NAMES))
        if not isinstance(value, int | float) or not 0 <= value < float("inf"):
            raise ConfigError(f"devices: {device}: {name} = {value!r} is not a number of 0 or more", "calibrate anew")
        if name in RATES and not value:
            raise ConfigError(f"devices: {device}: {name} = {value!r} is no rate above 0", "calibrate anew")
    return Software(**given)


def software_data(software: Software) -> dict[str, float]:
    return asdict(software)
