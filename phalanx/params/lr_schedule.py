"""The learning rate over a run: warm-up, then one of three shapes. Pure, so that a resumed run repeats it exactly."""

from __future__ import annotations

import math


def lr_factor(step: int, *, total: int, warmup: int, shape: str, min_ratio: float) -> float:
    """The share of the peak learning rate that step `step` of 1 … `total` uses.

    It rises linearly to 1 at step `warmup` and, unless the shape is constant, falls to `min_ratio` at the last step.
    """
    assert 1 <= step <= total and 0 <= warmup <= total, (step, total, warmup)
    if step < warmup:
        return step / warmup
    if shape == "constant" or step == warmup:
        return 1.0
    done = (step - warmup) / (total - warmup)
    height = 1 - done if shape == "linear" else (1 + math.cos(math.pi * done)) / 2
    return min_ratio + (1 - min_ratio) * height
