"""The learning rate over a run: warm-up, then one of three shapes, or a function or scheduler of the user's own. It
follows from the step alone, so that a resumed run repeats it exactly."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from phalanx.config import RunConfig
from phalanx.errors import ConfigError


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


LrFunction = Callable[[int], float]  # step, from 1 → its learning rate
MakeScheduler = Callable[[torch.optim.Optimizer], LRScheduler]
_REPLACED = ("lr_schedule", "warmup_steps", "min_lr_ratio", "lr_steps")  # options that it stands before


def require_no_schedule(config: RunConfig, what: str) -> None:
    for name in _REPLACED:
        value = getattr(config, name)
        if value != RunConfig.model_fields[name].default:
            raise ConfigError(
                f"option {name} = {value!r} does nothing: {what} says what the rate is", f"leave {name} out"
            )


def checked_rate(function: LrFunction, step: int) -> float:
    """What it says for a step, if that is a rate."""
    rate = function(step)
    if not isinstance(rate, int | float) or isinstance(rate, bool) or not math.isfinite(rate) or rate < 0:
        raise ConfigError(f"lr_function gave {rate!r} for step {step}", "return a number that is at least 0")
    return float(rate)


class ScheduledRate:
    """The learning rate that a scheduler gives to an optimizer whose rate is `lr`. It is run beside an optimizer that
    trains nothing, so that the rate of any step can be asked for, and a run that goes on continues where it was."""

    def __init__(self, make: MakeScheduler, lr: float) -> None:
        self._make, self._lr = make, lr
        self._restart()

    def __call__(self, step: int) -> float:
        if step < self._step:
            self._restart()
        while self._step < step:
            self._optimizer.step()
            self._scheduler.step()
            self._step += 1
            self._require_only_rate()
        return float(self._optimizer.param_groups[0]["lr"])

    def __reduce__(self) -> Any:
        return ScheduledRate, (self._make, self._lr)

    def _restart(self) -> None:
        self._optimizer = torch.optim.SGD([torch.zeros(1)], lr=self._lr, momentum=0.9)
        self._scheduler, self._step = self._make(self._optimizer), 1
        if not isinstance(self._scheduler, LRScheduler) or isinstance(self._scheduler, ReduceLROnPlateau):
            raise ConfigError(
                f"scheduler made a {type(self._scheduler).__name__}, whose rate is not a function of the step",
                "give a function from an optimizer to one of torch.optim.lr_scheduler, e.g. "
                "lambda optimizer: CosineAnnealingLR(optimizer, 1000); for ReduceLROnPlateau use early_stop",
            )
        self._require_only_rate()

    def _require_only_rate(self) -> None:
        if self._optimizer.param_groups[0]["momentum"] != 0.9:
            raise ConfigError(
                f"{type(self._scheduler).__name__} also changes momentum, which a run keeps as it is",
                "set cycle_momentum=False",
            )
