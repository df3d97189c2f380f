"""What a run leaves behind, for the program that called it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from phalanx.config import RunConfig
from phalanx.model.zoo.zoo import Model, ModelSpec, build
from phalanx.state import checkpoint


@dataclass(frozen=True)
class Summary:
    """What came of a run. `losses` are those of the steps made this time, one per step."""

    steps: int
    loss: float
    eval_loss: float | None
    losses: tuple[float, ...]
    skipped: int
    folder: Path
    checkpoint: Path
    export: Path | None
    spec: ModelSpec | None = field(repr=False)  # None where the model is the user's own module


@dataclass(frozen=True)
class Result(Summary):
    """A summary, and the trained model."""

    model: Model = field(repr=False, kw_only=True)
    config: RunConfig = field(repr=False, kw_only=True)

    def module(self) -> nn.Module:
        """The trained model: the user's own module, or a new one of the model's class, on the CPU in eval mode."""
        if isinstance(self.model, nn.Module):
            return self.model
        assert self.spec is not None
        module = build(self.spec, dtype=getattr(torch, self.config.dtype), dropout=self.config.dropout)
        config: Any = getattr(module, "config", None)
        if config is not None and self.spec.config is not None:
            config.use_cache = getattr(self.spec.config, "use_cache", False)  # training is built without one
        fill(module, self.checkpoint)
        return module.eval()


@torch.no_grad()
def fill(module: nn.Module, path: Path) -> None:
    """Copies the values of parameters, in the highest precision there is, from a checkpoint into a module."""
    found = checkpoint.open(path, verify=False)
    stored = set(found.names())
    for name, parameter in module.named_parameters():
        key = f"master/{name}" if f"master/{name}" in stored else f"model/{name}"
        parameter.copy_(found.read(key))
