"""Ctrl-C, SIGTERM and SIGHUP as a request to stop, to a rank and to a process that supervises ranks.

A rank's first signal lets the step finish and be saved, the second means it. A supervisor only notes signals and passes
them on: saying what will happen is the ranks' business. Whoever manages jobs often tells all processes of one, and a
rank hears the same from its supervisor a moment later: that is one signal.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

_ONE_SECONDS = 0.3  # in which signals that come are one
_NOT_SAVED = "once more: stopping at once; the steps since the newest checkpoint are lost"


def stopping_signals() -> list[signal.Signals]:
    """Those that ask a run to stop. A SIGHUP that is ignored (nohup) asks for nothing."""
    hangs_up = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
    return [signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if hangs_up else [])]


def say(number: int, text: str) -> None:
    """From within a handler, which may run in the middle of a print and so must not print itself."""
    with suppress(OSError):  # the terminal may be gone
        os.write(2, f"\n{signal.Signals(number).name}: {text}\n".encode())


class _Counted:
    """Signals, of which those that come together are one."""

    def __init__(self) -> None:
        self._came = float("-inf")

    def is_another(self) -> bool:
        now = time.monotonic()
        is_another = now - self._came > _ONE_SECONDS
        self._came = now if is_another else self._came
        return is_another


class StopRequest:
    """`signal` is what asked the run to stop, None as long as nothing has."""

    signal: signal.Signals | None = None


@contextmanager
def stop_request(speaks: bool = True) -> Iterator[StopRequest]:
    """Within it the first signal is noted and, if it `speaks`, answered; a second one acts as it would without us."""
    request, counted = StopRequest(), _Counted()
    before: dict[signal.Signals, Any] = {}

    def note(number: int, frame: FrameType | None) -> None:
        if not counted.is_another():
            return
        if request.signal is None:
            request.signal = signal.Signals(number)
            if speaks:
                say(number, "finishing this step and saving; once more stops at once")
            return
        _restore(before)
        if speaks:
            say(number, _NOT_SAVED)
        signal.raise_signal(number)

    with _handled_by(note, before):
        yield request


class StopSignal:
    """The signals that came, in order."""

    def __init__(self) -> None:
        self.signals: list[int] = []

    def require_patience(self) -> None:
        """A second signal means it."""
        if len(self.signals) > 1:
            number = self.signals[-1]
            say(number, _NOT_SAVED)
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)


@contextmanager
def stop_signal() -> Iterator[StopSignal]:
    """Within it these signals are noted instead of acting."""
    stop, counted = StopSignal(), _Counted()

    def note(number: int, frame: FrameType | None) -> None:
        if counted.is_another():
            stop.signals.append(number)

    with _handled_by(note, {}):
        yield stop


@contextmanager
def _handled_by(handler: Any, before: dict[signal.Signals, Any]) -> Iterator[None]:
    """Within it `handler` is called for signals; `before` gets what was called until then."""
    # Only the main thread may set handlers; elsewhere whoever started the thread decides what signals do.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before.update({number: signal.signal(number, handler) for number in stopping_signals()})
    try:
        yield
    finally:
        _restore(before)


def _restore(handlers: dict[signal.Signals, Any]) -> None:
    for number, handler in handlers.items():
        signal.signal(number, handler)
