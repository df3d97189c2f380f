"""The abort event of one rank: set once when the job cannot go on, so that everything that waits lets go.

A rank's heartbeat shows the supervisor that it lives and sets the event when the board says that the job is over. While
the heart does not beat, where the rank's threads stand is written to a file (`StackFile`).
Calls that nothing can make let go are made on a thread of their own (`within`), which is abandoned. Threads that call
into torch are made by `background_thread`, so that the interpreter does not end in the middle of such a call.
"""

from __future__ import annotations

import atexit
import faulthandler
import os
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from phalanx.launch.status_board import StatusSlot

BEAT_SECONDS = 0.25
_LOOK_SECONDS = 0.05
_END_SECONDS = 5.0  # that calls of threads in the background have to return in when the interpreter ends
T = TypeVar("T")


class AbortEvent:
    """`reason` is None until it is set. Listeners are called on the thread that sets it, once."""

    def __init__(self) -> None:
        self.reason: str | None = None
        self._listeners: list[Callable[[], None]] = []
        self._lock, self._is_set = threading.Lock(), threading.Event()

    def listen(self, listener: Callable[[], None]) -> None:
        """Call `listener` when the event is set; at once if it already is."""
        with self._lock:
            self._listeners.append(listener)
            late = self.reason is not None
        if late:
            listener()

    def forget(self, listener: Callable[[], None]) -> None:
        with self._lock:
            self._listeners = [other for other in self._listeners if other != listener]

    def set(self, reason: str) -> None:
        with self._lock:
            if self.reason is not None:
                return
            self.reason = reason
            listeners = list(self._listeners)
        self._is_set.set()
        for listener in listeners:
            listener()

    def wait(self, seconds: float) -> bool:
        """Wait for it to be set; whether it was."""
        return self._is_set.wait(seconds)


class StackFile:
    """Holds where the threads of this process stand if `beat` has not been called for `seconds`, or it was told to show
    it; else nothing.

    It is written by a thread that needs no lock of Python's, so a call that keeps all threads waiting shows in it.
    """

    def __init__(self, path: Path, seconds: float) -> None:
        self._seconds, self._file = seconds, path.open("ab")

    def beat(self, shows: bool = False) -> None:
        if os.fstat(self._file.fileno()).st_size:
            os.ftruncate(self._file.fileno(), 0)
        if shows:
            faulthandler.dump_traceback(self._file)
        faulthandler.dump_traceback_later(self._seconds, repeat=True, file=self._file)

    def close(self) -> None:
        faulthandler.cancel_dump_traceback_later()
        self._file.close()


def read_stack(path: Path, num_lines: int = 12) -> list[str]:
    """Where the main thread stood when its process wrote the file, the innermost call first."""
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return []
    # The newest thread comes first, so the main one is the last of the last time it was written.
    return [line.strip() for line in text.rpartition("hread 0x")[2].splitlines()[1:] if line.strip()][:num_lines]


def calls(stack: Sequence[str], num_calls: int = 5) -> str:
    """'wait (threading.py:331), wait (threading.py:629), collate (mine.py:12)', of lines that `read_stack` gave."""
    found = (re.fullmatch(r'File "(.*)", line (\d+) in (.*)', line) for line in stack[:num_calls])
    return ", ".join(f"{each[3]} ({Path(each[1]).name}:{each[2]})" for each in found if each)


_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def background_thread(run: Callable[[], None], name: str) -> threading.Thread:
    """A thread, not yet started, that does not keep the process alive.

    Python ends such a thread when it comes back from a call after the interpreter began to end; where the call is one
    of torch's, that aborts the whole process (SIGABRT). So the end waits for calls that are about to return.
    """
    thread = threading.Thread(target=run, name=name, daemon=True)
    _threads.add(thread)
    return thread


@atexit.register
def _let_calls_return() -> None:
    deadline = time.monotonic() + _END_SECONDS
    for thread in list(_threads):
        if thread.is_alive():
            thread.join(max(0.0, deadline - time.monotonic()))


@contextmanager
def heartbeat(slot: StatusSlot, look: Callable[[], None], stack: StackFile) -> Iterator[None]:
    """Within it a thread shows signs of life, and looks whether the job is over or its ranks are others."""
    ended = threading.Event()

    def beat() -> None:
        looks = 0
        while not ended.wait(_LOOK_SECONDS):
            looks += 1
            if looks % round(BEAT_SECONDS / _LOOK_SECONDS) == 0:
                slot.beat()
                stack.beat(shows=slot.is_asked)
            look()

    thread = background_thread(beat, "phalanx-heartbeat")
    stack.beat()
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        stack.close()


class Late(Exception):
    """The call had not come back when its time was over, or was no longer wanted."""


def within(seconds: float, call: Callable[[], T], *, unless: Callable[[], bool] | None = None) -> T:
    """The result of `call`, made on a thread of its own that is abandoned when it takes longer.

    `unless` is asked every tenth of a second and ends the wait early.
    """
    ended, abandoned = threading.Event(), threading.Event()
    outcome: dict[str, Any] = {}

    def run() -> None:
        try:
            outcome["result"] = call()
        except BaseException as error:
            if not abandoned.is_set():  # else it would keep, in a circle with this, all that the call had made
                outcome["error"] = error
        ended.set()

    background_thread(run, "phalanx-call").start()
    slices = max(1, round(seconds / 0.1))
    for _ in range(slices):
        if ended.wait(seconds / slices) or (unless is not None and unless()):
            break
    if not ended.is_set():
        abandoned.set()
        raise Late
    if "error" in outcome:
        raise outcome["error"]
    return outcome["result"]
