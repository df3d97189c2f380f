"""The learning rate over a run: warm-up, then one of three shapes. Pure, so that a resumed run repeats it exactly."""

from __future__ import annotations

import math

from phalanx.config import RunConfig


def learning_rate(config: RunConfig, step: int, total_steps: int) -> float:
    """What step `step` of a run of `total_steps` uses. It runs its course over `lr_steps`, where given, and stays."""
    course = config.lr_steps or total_steps
    return config.lr * lr_factor(
        min(step, course), total=course, warmup=config.warmup_steps, shape=config.lr_schedule,
        min_ratio=config.min_lr_ratio,
    )  # fmt: skip


def change_text(config: RunConfig, step: int, steps_before: int, total_steps: int) -> str:
    """That a run that goes on after `step` with another length has another learning rate; "" if it has not."""
    if config.lr_steps or step + 1 > total_steps:
        return ""
    was, now = (learning_rate(config, min(step + 1, total), total) for total in (steps_before, total_steps))
    if was == now:
        return ""
    return f"its learning rate follows the new length from here: {now:.2e} at step {step + 1}, where it was {was:.2e}"


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
