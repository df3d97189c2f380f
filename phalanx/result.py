"""What a run leaves behind, for the program that called it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from torch import nn


@dataclass(frozen=True)
class Result:
    """What came of a run. `losses` are those of the steps made in this process, one per step."""

    steps: int
    loss: float
    eval_loss: float | None
    losses: tuple[float, ...]
    skipped: int
    folder: Path
    checkpoint: Path | None
    export: Path | None
    _module: Callable[[], nn.Module] = field(repr=False)

    def module(self) -> nn.Module:
        """The trained model: the user's own module, or a new one of the model's class, on the CPU in eval mode."""
        return self._module()
