"""Ctrl-C and SIGTERM as a wish to stop: the first lets the step finish and be saved, the second means it."""

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
    # Only the main thread may set handlers; elsewhere whoever started the thread decides what signals do.
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    before: dict[signal.Signals, Any] = {}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def note(number: int, frame: FrameType | None) -> None:
        request.signal = signal.Signals(number)
        restore()
        # A handler may run in the middle of a print, so it must not print itself.
        if say:
            os.write(2, f"\n{request.signal.name}: finishing this step and saving; once more stops at once\n".encode())

    before.update({number: signal.signal(number, note) for number in _SIGNALS})
    try:
        yield request
    finally:
        restore()
