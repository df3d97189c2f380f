"""Optimizers of the user's own in a session: they know nothing of it, so torch is asked to tell of every step that any
optimizer makes."""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook


class Updated(Protocol):
    """Whose parameters optimizers change."""

    def updates(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether these are among its parameters, and it is not the session that steps."""
        ...

    def before_own_step(self, optimizer: torch.optim.Optimizer) -> None: ...

    def after_own_step(self) -> None: ...


def watch_optimizers(session: Updated) -> list[Any]:
    """Optimizers of the user's own know nothing of sessions; torch tells of every step that one makes."""
    known = weakref.ref(session)

    def before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        own = known()
        if own is not None and own.updates(optimizer):
            own.before_own_step(optimizer)

    def after(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        own = known()
        if own is not None and own.updates(optimizer):
            own.after_own_step()

    return [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]
