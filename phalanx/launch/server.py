"""The fork server: a process that has imported what ranks need and becomes a rank in milliseconds when asked.

It does not import the user's main module; a rank does (main_script.py), where it is given something defined there. It
reports who ended and how. A child of its own hosts the store that jobs use. When whoever started it is gone, ranks that
train get time to save (`orphans.py`), and all others are ended. When it is gone itself, they live on, and whoever
started it starts another one, which looks after them; once both are gone, the kernel ends them.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import os
import select
import selectors
import signal
import socket
import sys
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from phalanx.launch.handles import Handle
from phalanx.launch.orphans import STORE, Wards
from phalanx.launch.wire import Wire

MOST_ADOPTED = 200  # that come along with one message
_outputs: list[int] = []  # of a rank: where output goes that is to be shown


@dataclass(frozen=True)
class Begin:
    """The first message, answered by Ready. folder: that of the pool, with the board. saves: whether ranks save when
    they have lost their supervisor. adopted: process and rank of those that another server had started. Along come both
    ends of a pipe, which only servers and who starts them keep open, and handles of those that are adopted."""

    preload: tuple[str, ...]
    folder: str
    saves: bool
    adopted: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Ready:
    """All that ranks need was imported."""


@dataclass(frozen=True)
class Fork:
    """Become rank `rank`; the descriptor that comes along is its wire. Answered by Forked."""

    rank: int
    log: str  # where output goes that should not be shown, "" to show it


@dataclass(frozen=True)
class Host:
    """Have a process that holds a store. Answered by Hosted."""


@dataclass(frozen=True)
class End:
    """No more ranks are needed. A wire that closes without it was that of a process that was killed."""


@dataclass(frozen=True)
class Forked:
    rank: int
    pid: int


@dataclass(frozen=True)
class Hosted:
    """The process that holds a store, and the port at which it answers."""

    pid: int
    port: int


@dataclass(frozen=True)
class Ended:
    """A child is gone: its exit code, negative for the signal that killed it."""

    pid: int
    code: int


@dataclass(frozen=True)
class _Server:
    """pipe: both ends, as in `Begin`."""

    control: Wire
    pipe: tuple[int, int]
    wards: Wards

    def obey(self) -> bool:
        """Whether there will be more to do."""
        message, descriptors = self.control.receive_with_descriptors(1)
        if isinstance(message, End):
            return False
        if isinstance(message, Host):
            self._host_store()
            return True
        assert isinstance(message, Fork)
        pid = os.fork()
        if pid == 0:
            _become_rank(message, self.control, descriptors[0], self.pipe)
        os.close(descriptors[0])
        self.wards.add(pid, message.rank)
        self.control.send(Forked(message.rank, pid))
        return True

    def report_ended(self) -> None:
        for pid, code in self.wards.take_ended():
            with contextlib.suppress(ConnectionError):  # what is heard next says why nobody listens
                self.control.send(Ended(pid, code))

    def _host_store(self) -> None:
        """In a process that outlives whoever started us, as its ranks do while they save."""
        found, port = os.pipe()
        pid = os.fork()
        if pid == 0:
            _become_store(self.control, port, self.pipe)
        os.close(port)
        self.wards.add(pid, STORE)
        with open(found) as text:
            self.control.send(Hosted(pid, int(text.read() or 0)))


def main(descriptor: int) -> None:
    """Serve until the other end of the control wire closes."""
    control = Wire(socket.socket(fileno=descriptor))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        begin, (reading, writing, *handles) = control.receive_with_descriptors(MOST_ADOPTED + 2)
    except (EOFError, ConnectionError):
        os._exit(0)  # nobody needs it
    assert isinstance(begin, Begin)
    wards = Wards({rank: Handle(pid, own) for (pid, rank), own in zip(begin.adopted, handles, strict=True)})
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
    server = _Server(control, (reading, writing), wards)
    try:
        control.send(Ready())
        with selectors.DefaultSelector() as selector:
            selector.register(control, selectors.EVENT_READ)
            selector.register(wakeup, selectors.EVENT_READ)
            while True:
                ready = [key.fileobj for key, _ in selector.select()]
                if wakeup in ready:
                    wakeup.recv(4096)
                    server.report_ended()
                if control in ready and not server.obey():
                    return wards.end_all()
    except (EOFError, ConnectionError):
        os._exit(wards.let_go(Path(begin.folder), begin.saves))


def _become_store(control: Wire, port: int, pipe: tuple[int, int]) -> None:
    """Runs in the child and never returns. port: where the port is to be written."""
    try:
        _live_with(pipe)
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


def _become_rank(message: Fork, control: Wire, descriptor: int, pipe: tuple[int, int]) -> None:
    """Runs in the child and never returns."""
    code = 1
    try:
        _live_with(pipe)
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


def _live_with(pipe: tuple[int, int]) -> None:
    """Let the kernel end this process when nobody has the pipe's writing end any more, however those ended that had."""
    reading, writing = pipe
    if sys.platform == "linux":
        own = os.open(f"/proc/self/fd/{reading}", os.O_RDONLY | os.O_NONBLOCK)  # not what other ranks have open
        fcntl.fcntl(own, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(own, fcntl.F_SETSIG, signal.SIGKILL)  # in place of SIGIO
        fcntl.fcntl(own, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
        os.close(writing)
        poll = select.poll()
        poll.register(own, select.POLLIN)
        if poll.poll(0):
            os._exit(1)
    else:
        os.close(writing)
    os.close(reading)
