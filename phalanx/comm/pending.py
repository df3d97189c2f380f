"""Communication that was started and not yet awaited: the one place where a rank waits for others.

A wait blocks in the backend; it knows what it waits for and from whom, ends at a deadline, and lets go when the abort
event is set. Between CPU ranks shutting gloo's sockets makes a blocked wait let go, so they are found here, too. But
gloo forgets an operation of which a message is half sent or half received when its connection breaks: nothing ends that
wait, so it is made in slices, and given up. gloo's own deadlines go by the time of day, in which this process may have
been stopped; they are not used.
"""

from __future__ import annotations

import os
import re
import socket
import stat
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torch import Tensor

from phalanx.errors import LateError, LinkError
from phalanx.launch.abort import background_thread
from phalanx.launch.status_board import RunningClock

if TYPE_CHECKING:
    from phalanx.launch.context import RankContext

Sockets = dict[int, int]  # file descriptor → inode, which tells a descriptor from a later one of the same number


NEVER = timedelta(days=365)
_SLICE = timedelta(seconds=0.1)  # of a wait between CPU ranks; also what an operation has to fail in by itself


class Deadline:
    """Makes the wait of one thread let go when it takes longer than `seconds` in which this process ran."""

    def __init__(self, seconds: float, let_go: Callable[[], None]) -> None:
        self.seconds, self.missed_by, self.let_go = seconds, None, let_go
        self._waiting: Pending | None = None
        self._ended = threading.Event()
        self._thread = background_thread(self._run, "phalanx-deadline")
        self._thread.start()

    def begin(self, pending: Pending | None) -> None:
        """None: the wait is over. Called for every message, so it must cost nothing."""
        self._waiting = pending

    def close(self) -> None:
        self._ended.set()

    def _run(self) -> None:
        clock, seen, since = RunningClock(), None, 0.0
        while not self._ended.wait(min(0.25, self.seconds / 10)):
            now, waiting = clock.read(), self._waiting
            if waiting is None or waiting is not seen:
                seen, since = waiting, now
            elif now - since > self.seconds:
                self.missed_by = waiting
                self.let_go()
                return


class Pending:
    """Started communication. Its tensors live, and must not be touched, until `wait` returns."""

    def __init__(
        self,
        context: RankContext,
        work: Any,
        tensors: tuple[Tensor, ...],
        *,
        deadline: Deadline,
        subject: str,
        partners: str,
        finish: Callable[[], None] | None = None,
        ended: Callable[[Pending], None] | None = None,
        backend: Any = None,
    ) -> None:
        self._context, self._work, self._deadline, self.backend = context, work, deadline, backend
        self._tensors, self.on_cuda = tensors, any(tensor.is_cuda for tensor in tensors)
        self._subject, self._partners, self._finish, self._ended = subject, partners, finish, ended

    def wait(self, what: str = "") -> None:
        """Block until the result is there; on CUDA, until the current stream will see it. `what` is for messages."""
        work = self._work
        if work is None:
            return
        began = time.monotonic()
        try:
            self._context.slot.wait(True)
            if self.on_cuda:
                work.wait()  # orders streams, does not block; a timeout here would make the host wait
            else:
                self._deadline.begin(self)
                self._wait_in_slices(work)
        except RuntimeError as error:
            raise self._explained(what, time.monotonic() - began, error) from error
        finally:
            self._deadline.begin(None)
            self._context.slot.wait(False)
        if self._context.abort.reason is not None:
            raise LinkError(f"{self._context.name} stopped at {what or self._subject}: {self._context.abort.reason}")
        if self._finish is not None:
            self._finish()
        self.forget()

    def _wait_in_slices(self, work: Any) -> None:
        """Until the operation has ended, or has not although its sockets were shut."""
        is_shut = False
        while True:
            try:
                return work.wait(_SLICE)
            except RuntimeError:
                if work.is_completed():
                    return work.wait()  # what came of it
                if is_shut:
                    raise
            if self._context.abort.reason is not None or self._deadline.missed_by is not None:
                self._deadline.let_go()
                is_shut = True

    def forget(self) -> None:
        """Lets go of everything: the operation is over."""
        if self._ended is not None:
            self._ended(self)
        self._work, self._tensors, self._finish, self._ended, self.backend = None, (), None, None, None

    def done(self) -> bool:
        """Whether `wait` would return at once."""
        work = self._work  # which another thread may have awaited by now
        return work is None or work.is_completed()

    def _explained(self, what: str, seconds: float, error: RuntimeError) -> LinkError:
        name, subject = self._context.name, what or self._subject
        if self._context.abort.reason is not None:
            return LinkError(f"{name} stopped waiting for {subject}: {self._context.abort.reason}")
        # NCCL has a deadline of its own.
        if self._deadline.missed_by is self or (self.on_cuda and seconds >= 0.95 * self._deadline.seconds):
            return late(name, seconds, subject, self._partners)
        return LinkError(f"{name} lost the connection while waiting for {subject} {self._partners} ({cause(error)})")


def late(name: str, seconds: float, subject: str, partners: str) -> LateError:
    return LateError(
        f"{name} waited {seconds:.0f} s for {subject} {partners}",
        "find out what the other side did in the meantime; a slow one needs a longer timeout",
    )


def cause(error: BaseException) -> str:
    """The first line of a library's error, without the place in its sources and its advice."""
    text = (str(error).strip() or type(error).__name__).splitlines()[0]
    return re.sub(r"\[\S+\.(cc|cpp|h):\d+\] ", "", text).partition(". This is typically")[0]


def is_lost_connection(error: BaseException) -> bool:
    """Whether an error of starting an operation says that the other side is gone, and not that we did wrong."""
    return any(sign in str(error) for sign in ("gloo/transport", "onnection", "Broken pipe", "remote process exited"))


def open_sockets() -> Sockets:
    """Every socket this process has open."""
    found: Sockets = {}
    for name in os.listdir("/dev/fd"):
        with suppress(OSError):
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                found[int(name)] = status.st_ino
    return found


def opened_since(before: Sockets) -> Sockets:
    return {number: inode for number, inode in open_sockets().items() if before.get(number) != inode}


def shut(sockets: Sockets, *, spare_port: int) -> None:
    """End the connections of these sockets that still exist; whoever waits on either end gets an error.

    ProcessGroups from or to `spare_port` stay: the store's, which others may open on other threads at any time.
    """
    for number, inode in sockets.items():
        with suppress(OSError):
            if os.fstat(number).st_ino != inode:
                continue
            with socket.socket(fileno=os.dup(number)) as one:
                if one.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                peer = one.getpeername()  # raises for a listening socket, which must be left alone
                if spare_port not in (peer[1], one.getsockname()[1]):
                    one.shutdown(socket.SHUT_RDWR)
