"""Signals to a process that supervises ranks: noted, so that the supervisor can pass them on.

Saying what will happen is the ranks' business (runtime/signals.py); here nothing is printed.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Wish:
    """The signals that came, in order."""

    def __init__(self) -> None:
        self.signals: list[int] = []


@contextmanager
def wishes() -> Iterator[Wish]:
    """Within it SIGINT and SIGTERM are noted instead of acting."""
    wish = Wish()
    # Only the main thread may set handlers; elsewhere whoever started the thread decides what signals do.
    if threading.current_thread() is not threading.main_thread():
        yield wish
        return
    before = {
        number: signal.signal(number, lambda number, frame: wish.signals.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield wish
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
