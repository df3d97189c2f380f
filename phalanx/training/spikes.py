"""Loss spikes: what loss is so far above recent ones that its step had better not update anything.

The limit of a step follows from losses of steps before the one before it: on GPUs that one's is still on its way. So it
is the same on every device, and however often a run is saved.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from phalanx.errors import PhalanxError

MOST_ROLLBACKS = 3  # of one run
NUM_RECENT = 33  # losses that are remembered: one more than are asked for
_FEWEST = 8  # without so many, nothing is a spike: at the beginning losses fall fast


class RollBack(PhalanxError):
    """A spike after which the run goes back. Raised by every rank, and taken by who started them.

    passed_over: the samples that are left out from then on, in all.
    """

    def __init__(self, message: str, hint: str = "", passed_over: int = 0, checkpoint: str = "") -> None:
        super().__init__(message, hint)
        self.passed_over, self.checkpoint = passed_over, checkpoint


def spike_limit(recent: Sequence[tuple[int, float]], step: int, factor: float) -> float | None:
    """The largest loss with which `step` updates; None for any. recent: steps that updated, and their losses."""
    known = [loss for earlier, loss in recent if earlier < step - 1][-(NUM_RECENT - 1) :]
    return factor * median(known) if len(known) >= _FEWEST else None
