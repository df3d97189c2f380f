"""A predicted timeline beside a measured one: per kind of instruction, and for the whole step. Numbers only."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.program.instructions import Op
from phalanx.program.timeline import Timeline


@dataclass(frozen=True)
class Pair:
    """One quantity, predicted and measured; None: that timeline has nothing of the kind."""

    predicted: float | None
    measured: float | None

    @property
    def error(self) -> float | None:
        """By how much the prediction is off, as a share of what was measured: -0.1 is a tenth too low."""
        if self.predicted is None or not self.measured:
            return None
        return self.predicted / self.measured - 1


@dataclass(frozen=True)
class Comparison:
    """kinds: mean seconds of one instruction of each kind that either timeline has, in the order of `Op`."""

    kinds: dict[Op, Pair]
    makespan: Pair
    bubble: Pair


def compare(predicted: Timeline, measured: Timeline) -> Comparison:
    means = _means(predicted), _means(measured)
    kinds = {op: Pair(means[0].get(op), means[1].get(op)) for op in Op if op in means[0] or op in means[1]}
    return Comparison(
        kinds,
        Pair(predicted.makespan, measured.makespan),
        Pair(predicted.mean_bubble, measured.mean_bubble),
    )


def _means(timeline: Timeline) -> dict[Op, float]:
    seconds: dict[Op, list[float]] = {}
    for event in timeline.events:
        seconds.setdefault(event.instruction.op, []).append(event.seconds)
    return {op: sum(durations) / len(durations) for op, durations in seconds.items()}
