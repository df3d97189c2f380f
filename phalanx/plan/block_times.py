"""Seconds of a model's blocks that were measured, in the place of what a device's figures say. Pure;
`profile/model.py` measures.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple


class BlockTime(NamedTuple):
    """Of one micro-batch of so many samples. backward: gradients of inputs; weight: what those of weights add to it."""

    samples: float
    forward: float
    backward: float
    weight: float


Times = Mapping[int, tuple[BlockTime, ...]]  # by tensor-parallel degree; samples rise


def seconds_at(known: Sequence[BlockTime], samples: float) -> tuple[float, float, float]:
    """On straight lines between numbers of samples that were measured; beyond the last in proportion to it, before the
    first as long as that."""
    first, last = known[0], known[-1]
    if samples <= first.samples:
        return first[1:]
    if samples >= last.samples:
        forward, backward, weight = (seconds * samples / last.samples for seconds in last[1:])
        return forward, backward, weight
    place = next(i for i, own in enumerate(known) if own.samples >= samples)
    less, more = known[place - 1], known[place]
    share = (samples - less.samples) / (more.samples - less.samples)
    forward, backward, weight = (a + share * (b - a) for a, b in zip(less[1:], more[1:], strict=True))
    return forward, backward, weight


def at_degree(times: Times, degree: int, samples: float) -> tuple[float, float, float]:
    """At a degree that was not measured: in proportion to the nearest below it that was, or the lowest of all."""
    nearest = max((own for own in times if own <= degree), default=min(times))
    forward, backward, weight = (nearest / degree * own for own in seconds_at(times[nearest], samples))
    return forward, backward, weight
