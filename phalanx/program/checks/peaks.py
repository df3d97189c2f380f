"""The most of everything that a rank holds at once."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Level:
    """How much of something there is, and the most there ever was."""

    now: int = 0
    peak: int = 0

    def add(self, number: int) -> None:
        self.now += number
        self.peak = max(self.peak, self.now)


@dataclass(frozen=True)
class Peaks:
    """Halves of micro-batches, where a plan has them, count as micro-batches.

    activations: (stage, micro-batch) pairs whose forward is done and whose B or BW is not.
    weights_pending: pairs whose B is done and whose W is not.
    buffers: messages whose receive is posted and whose computation has not begun.
    gathered: buckets gathered by ZeRO 3."""

    activations: int
    weights_pending: int
    buffers: int
    gathered: int
