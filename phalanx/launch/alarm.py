"""The alarm of one rank: rung once when the job cannot go on, so that everything that waits lets go.

A rank's heartbeat shows the supervisor that it lives and rings the alarm when the board says that the job is over.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from phalanx.launch.board import Board, Slot

BEAT_SECONDS = 0.25


class Alarm:
    """`reason` is None until it rings. Listeners are called on the thread that rings, once."""

    def __init__(self) -> None:
        self.reason: str | None = None
        self._listeners: list[Callable[[], None]] = []
        self._lock, self._rung = threading.Lock(), threading.Event()

    def listen(self, listener: Callable[[], None]) -> None:
        """Call `listener` when the alarm rings; at once if it already has."""
        with self._lock:
            self._listeners.append(listener)
            late = self.reason is not None
        if late:
            listener()

    def forget(self, listener: Callable[[], None]) -> None:
        with self._lock:
            self._listeners = [other for other in self._listeners if other != listener]

    def ring(self, reason: str) -> None:
        with self._lock:
            if self.reason is not None:
                return
            self.reason = reason
            listeners = list(self._listeners)
        self._rung.set()
        for listener in listeners:
            listener()

    def wait(self, seconds: float) -> bool:
        """Wait for it to ring; whether it did."""
        return self._rung.wait(seconds)


@contextmanager
def heartbeat(board: Board, slot: Slot, alarm: Alarm) -> Iterator[None]:
    """Within it a thread shows signs of life and listens for the abort flag."""
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(BEAT_SECONDS):
            slot.beat()
            if board.aborted:
                alarm.ring("another rank failed")

    thread = threading.Thread(target=beat, name="phalanx-heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
