"""The fork server: a process that has imported what ranks need and becomes a rank in milliseconds when asked.

It does not import the user's main module; a rank does (main_script.py), where it is given something defined there. It
reports who ended and how. A child of its own hosts the store that jobs use. When whoever started it is gone, ranks that
train get time to save (`orphans.py`), and all others are ended.
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
from datetime import timedelta
from pathlib import Path

from phalanx.launch.orphans import STORE, end_all, let_go
from phalanx.launch.wire import Wire

_outputs: list[int] = []  # of a rank: where output goes that is to be shown


@dataclass(frozen=True)
class Begin:
    """The first message. folder: that of the pool, with the board. saves: whether ranks save when they have lost their
    supervisor."""

    preload: tuple[str, ...]
    folder: str
    saves: bool


@dataclass(frozen=True)
class Fork:
    """Become rank `rank`; the descriptor that comes along is its wire. Answered by Forked."""

    rank: int
    log: str  # where output goes that should not be shown, "" to show it


@dataclass(frozen=True)
class End:
    """No more ranks are needed. A wire that closes without it was that of a process that was killed."""


@dataclass(frozen=True)
class Forked:
    rank: int
    pid: int


@dataclass(frozen=True)
class Hosted:
    """The process that holds the store, said before anything else, and the port at which it answers."""

    pid: int
    port: int


@dataclass(frozen=True)
class Ended:
    """A child is gone: its exit code, negative for the signal that killed it."""

    pid: int
    code: int


def main(descriptor: int) -> None:
    """Serve until the other end of the control wire closes."""
    control = Wire(socket.socket(fileno=descriptor))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        begin, _ = control.receive_with_descriptors(0)
    except (EOFError, ConnectionError):
        os._exit(0)  # nobody needs it
    assert isinstance(begin, Begin)
    gc.disable()  # no cycles of modules are garbage, and searching for some takes a tenth of the time
    for name in begin.preload:
        importlib.import_module(name)
    gc.enable()
    gc.freeze()  # what is shared with the children stays shared
    wakeup, woken = socket.socketpair()
    for end in (wakeup, woken):
        end.setblocking(False)
    signal.set_wakeup_fd(woken.fileno())
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    children = {_host_store(control): STORE}  # process → rank
    try:
        with selectors.DefaultSelector() as selector:
            selector.register(control, selectors.EVENT_READ)
            selector.register(wakeup, selectors.EVENT_READ)
            while True:
                ready = [key.fileobj for key, _ in selector.select()]
                if wakeup in ready:
                    wakeup.recv(4096)
                    _report_ended(control, children)
                if control in ready and not _obey(control, children):
                    return end_all(children)
    except (EOFError, ConnectionError):
        os._exit(let_go(children, Path(begin.folder), begin.saves))


def _host_store(control: Wire) -> int:
    """The process that holds the store: one that outlives whoever started us, as its ranks do while they save."""
    parent, (found, port) = os.getpid(), os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            _die_with(parent)
            signal.set_wakeup_fd(-1)
            control.close()
            _say_into(os.devnull, 1)
            from phalanx.launch.store import WAIT_SECONDS, host_store

            store = host_store("127.0.0.1", 0, timedelta(seconds=WAIT_SECONDS))
            os.write(port, str(store.port).encode())
            os.close(port)
            while True:
                signal.pause()
        except BaseException as error:
            sys.excepthook(type(error), error, error.__traceback__)
        finally:
            os._exit(1)
    os.close(port)
    with open(found) as text:
        control.send(Hosted(pid, int(text.read() or 0)))
    return pid


def _obey(control: Wire, children: dict[int, int]) -> bool:
    """Whether there will be more to do."""
    message, descriptors = control.receive_with_descriptors(1)
    if isinstance(message, End):
        return False
    assert isinstance(message, Fork)
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        _become_rank(message, control, descriptors[0], parent)
    os.close(descriptors[0])
    children[pid] = message.rank
    control.send(Forked(message.rank, pid))
    return True


def _report_ended(control: Wire, children: dict[int, int]) -> None:
    for pid in tuple(children):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            del children[pid]
            with contextlib.suppress(ConnectionError):  # what is heard next says why nobody listens
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
            _say_into(message.log, 1, 2)
        from phalanx.launch.rank_main import serve

        serve(message.rank, Wire(socket.socket(fileno=descriptor)))
        code = 0
    except SystemExit:  # a signal came when there was nothing to leave
        pass
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        for output in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                output.flush()
        os._exit(code)


def _say_into(path: str, *outputs: int) -> None:
    target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for output in outputs:
        os.dup2(target, output)
    os.close(target)


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
