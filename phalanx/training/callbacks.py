"""Callbacks of a run: objects of the user's with any of the methods in `HOOKS`.

They are checked when they are given, so that a misspelt method is not silently never called; what one raises is
reported under its name.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Sequence
from typing import Any, Protocol

from phalanx.errors import ConfigError, PhalanxError, nearest

HOOKS = {
    "on_start": "(trainer) before the first step",
    "on_step": "(record) after a step",
    "on_evaluate": "(record) after an evaluation",
    "on_change": "(record) after a change of plan, or its refusal",
    "on_loss": "(record) after ranks were lost and the others went on",
    "on_checkpoint": "(path) once a checkpoint is complete",
    "on_end": "(result) when the run is over",
}


class Emit(Protocol):
    """Where a run's hooks are called: (name of the hook, its arguments)."""

    def __call__(self, hook: str, *arguments: Any) -> None: ...


class Callbacks:
    """Calls every callback in the order given."""

    def __init__(self, callbacks: Sequence[Any]) -> None:
        self._callbacks = tuple(callbacks)
        for callback in self._callbacks:
            _check(callback)

    def call(self, hook: str, *arguments: Any) -> None:
        assert hook in HOOKS, hook
        for callback in self._callbacks:
            method = getattr(callback, hook, None)
            if method is None:
                continue
            try:
                method(*arguments)
            except Exception as error:
                name = f"callback {type(callback).__name__}.{hook}"
                raise PhalanxError(
                    f"{name} failed at {_where(error)}: {type(error).__name__}: {error}",
                    "mend the callback; resume=auto goes on from the newest checkpoint, where there is one",
                ) from error


def _where(error: Exception) -> str:
    """The user's line: the innermost outside installed packages."""
    frames = traceback.extract_tb(error.__traceback__)[1:]
    own = [frame for frame in frames if "site-packages" not in frame.filename]
    found = (own or frames)[-1]
    return f"{os.path.relpath(found.filename)}:{found.lineno}"


def _check(callback: Any) -> None:
    methods = [name for name in dir(callback) if name.startswith("on_")]
    for name in methods:
        if name not in HOOKS:
            unknown = f"callback {type(callback).__name__} has an unknown method {name!r}"
            raise ConfigError(unknown, nearest(name, HOOKS))
    if not methods:
        raise ConfigError(
            f"callback {type(callback).__name__} has none of the methods that are called", f"give it {', '.join(HOOKS)}"
        )
