"""Calls that may never come back, given a deadline."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class Late(Exception):
    """The call had not come back when its time was over, or was no longer wanted."""


def within(seconds: float, call: Callable[[], T], *, unless: Callable[[], bool] | None = None) -> T:
    """The result of `call`, made on a thread of its own that is abandoned when it takes longer.

    `unless` is asked every tenth of a second and ends the wait early.
    """
    ended = threading.Event()
    outcome: dict[str, Any] = {}

    def run() -> None:
        try:
            outcome["result"] = call()
        except BaseException as error:
            outcome["error"] = error
        ended.set()

    threading.Thread(target=run, name="phalanx-deadline", daemon=True).start()
    slices = max(1, round(seconds / 0.1))
    for _ in range(slices):
        if ended.wait(seconds / slices) or (unless is not None and unless()):
            break
    if not ended.is_set():
        raise Late
    if "error" in outcome:
        raise outcome["error"]
    return outcome["result"]
