"""Ctrl-C and SIGTERM as a request to stop, to a rank and to a process that supervises ranks.

A rank's first signal lets the step finish and be saved, the second means it. A supervisor only notes signals and passes
them on: saying what will happen is the ranks' business.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """`signal` is what asked the run to stop, None as long as nothing has."""

    signal: signal.Signals | None = None


@contextmanager
def stop_request(say: bool = True) -> Iterator[StopRequest]:
    """Within it the first signal is noted and, with `say`, answered; a second one acts as it would have without us."""
    request = StopRequest()
    before: dict[signal.Signals, Any] = {}

    def note(number: int, frame: FrameType | None) -> None:
        request.signal = signal.Signals(number)
        _restore(before)
        # A handler may run in the middle of a print, so it must not print itself.
        if say:
            os.write(2, f"\n{request.signal.name}: finishing this step and saving; once more stops at once\n".encode())

    with _handled_by(note, before):
        yield request


class StopSignal:
    """The signals that came, in order."""

    def __init__(self) -> None:
        self.signals: list[int] = []


@contextmanager
def stop_signal() -> Iterator[StopSignal]:
    """Within it SIGINT and SIGTERM are noted instead of acting."""
    stop = StopSignal()
    with _handled_by(lambda number, frame: stop.signals.append(number), {}):
        yield stop


@contextmanager
def _handled_by(handler: Any, before: dict[signal.Signals, Any]) -> Iterator[None]:
    """Within it `handler` is called for signals; `before` gets what was called until then."""
    # Only the main thread may set handlers; elsewhere whoever started the thread decides what signals do.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before.update({number: signal.signal(number, handler) for number in _SIGNALS})
    try:
        yield
    finally:
        _restore(before)


def _restore(handlers: dict[signal.Signals, Any]) -> None:
    for number, handler in handlers.items():
        signal.signal(number, handler)
