"""A fork server made of this process itself, as soon as it has imported what ranks need: ranks then start seconds
earlier, because nothing is imported twice.

A fork has one thread, whatever its parent had, so this is for commands that have done nothing else by then: no tensor
was computed (torch would have started threads), no GPU asked for. The first pool that is opened takes the server; where
none is, it ends with the command.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

from phalanx.launch import server
from phalanx.launch.wire import Wire

_LOOK_SECONDS = 0.005
_waiting: list[tuple[ForkedServer, Wire]] = []


class ForkedServer:
    """What of `subprocess.Popen` is needed of a server."""

    def __init__(self, pid: int) -> None:
        self.pid, self._code = pid, None

    def poll(self) -> int | None:
        if self._code is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if ended else None
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("fork server", timeout or 0.0)
            time.sleep(_LOOK_SECONDS)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


@contextlib.contextmanager
def early_server() -> Iterator[None]:
    """Around a command that may open a pool."""
    if sys.platform != "linux" or threading.active_count() > 1:
        yield
        return
    _waiting.append(_forked())
    try:
        yield
    finally:
        drop()


def take() -> tuple[ForkedServer, Wire] | None:
    """The server and the wire to it, if there is one that nobody has taken."""
    found = _waiting.pop() if _waiting else None
    return found if found is not None and found[0].poll() is None else None


def drop() -> None:
    """No pool will be opened."""
    while _waiting:
        process, control = _waiting.pop()
        control.close()
        process.wait()


def _forked() -> tuple[ForkedServer, Wire]:
    ours, theirs = socket.socketpair()
    for output in (sys.stdout, sys.stderr):
        output.flush()
    pid = os.fork()
    if pid:
        theirs.close()
        return ForkedServer(pid), Wire(ours)
    try:
        ours.close()
        os.setsid()  # as in `processes.py`: the terminal's Ctrl-C is not for ranks
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        server.main(theirs.detach())
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        os._exit(1)
