"""The fork server: a process that has imported what ranks need and becomes a rank in milliseconds when asked.

It does not import the user's main module; a rank does (main_script.py), where it is given something defined there. It
reports who ended and how, and ends its children when whoever started it is gone.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import selectors
import signal
import socket
import sys
from dataclasses import dataclass

from phalanx.launch.wire import Wire

_outputs: list[int] = []  # of a rank: where output goes that is to be shown


@dataclass(frozen=True)
class Fork:
    """Become rank `rank`; the descriptor that comes along is its wire. Answered by Forked."""

    rank: int
    log: str  # where output goes that should not be shown, "" to show it


@dataclass(frozen=True)
class Forked:
    rank: int
    pid: int


@dataclass(frozen=True)
class Ended:
    """A child is gone: its exit code, negative for the signal that killed it."""

    pid: int
    code: int


def main(descriptor: int, preload: tuple[str, ...]) -> None:
    """Serve until the other end of the control wire closes."""
    control = Wire(socket.socket(fileno=descriptor))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name in preload:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # what is shared with the children stays shared
    wakeup, woken = socket.socketpair()
    for end in (wakeup, woken):
        end.setblocking(False)
    signal.set_wakeup_fd(woken.fileno())
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    children: set[int] = set()
    try:
        with selectors.DefaultSelector() as selector:
            selector.register(control, selectors.EVENT_READ)
            selector.register(wakeup, selectors.EVENT_READ)
            while True:
                ready = [key.fileobj for key, _ in selector.select()]
                if wakeup in ready:
                    wakeup.recv(4096)
                    _report_ended(control, children)
                if control in ready:
                    _obey(control, children)
    except (EOFError, ConnectionError):
        for pid in children:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _obey(control: Wire, children: set[int]) -> None:
    message, descriptors = control.receive_with_descriptors(1)
    assert isinstance(message, Fork)
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        _become_rank(message, control, descriptors[0], parent)
    os.close(descriptors[0])
    children.add(pid)
    control.send(Forked(message.rank, pid))


def _report_ended(control: Wire, children: set[int]) -> None:
    for pid in tuple(children):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            children.discard(pid)
            control.send(Ended(pid, os.waitstatus_to_exitcode(status)))


def _become_rank(message: Fork, control: Wire, descriptor: int, parent: int) -> None:
    """Runs in the child and never returns."""
    code = 1
    try:
        _die_with(parent)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        control.close()
        _outputs[:] = [os.dup(output) for output in (1, 2)]
        if message.log:
            target = os.open(message.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            for output in (1, 2):
                os.dup2(target, output)
            os.close(target)
        from phalanx.launch.rank_main import serve

        serve(message.rank, Wire(socket.socket(fileno=descriptor)))
        code = 0
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        for output in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                output.flush()
        os._exit(code)


def show_output() -> None:
    """Of a process that was not the one to show its output, and now is."""
    for output, shown in zip((1, 2), _outputs, strict=bool(_outputs)):
        os.dup2(shown, output)


def _die_with(parent: int) -> None:
    """Let the kernel end this process when the server ends, however it does."""
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
