"""Loss spikes: what loss is so far above recent ones that its step had better not update anything.

The limit of a step follows from losses of steps before the one before it: on GPUs that one's is still on its way. So it
is the same on every device, and however often a run is saved.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

NUM_RECENT = 33  # losses that are remembered: one more than are asked for
_FEWEST = 8  # without so many, nothing is a spike: at the beginning losses fall fast


def spike_limit(recent: Sequence[tuple[int, float]], step: int, factor: float) -> float | None:
    """The largest loss with which `step` updates; None for any. recent: steps that updated, and their losses."""
    known = [loss for earlier, loss in recent if earlier < step - 1][-(NUM_RECENT - 1) :]
    return factor * median(known) if len(known) >= _FEWEST else None
