"""Local rank processes: started from the fork server, spoken to over wires, signalled and ended.

Where the server ends, another one takes its place, and the ranks live on. It knows nothing of jobs; worker_pool.py
does.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from subprocess import DEVNULL, Popen, TimeoutExpired
from typing import Any

from phalanx.errors import RankError
from phalanx.launch import early
from phalanx.launch.handles import Handle
from phalanx.launch.orphans import STORE
from phalanx.launch.process import Process, how_it_ended
from phalanx.launch.server import MOST_ADOPTED, Begin, End, Ended, Fork, Forked, Host, Hosted, Ready
from phalanx.launch.torch_defaults import torch_defaults
from phalanx.launch.wire import Wire

_START_SECONDS = 120.0
_END_SECONDS = 10.0
_MORE_SERVERS = 2  # that are tried where the server ends when it is needed


class Processes:
    """The fork server and its children. Output of rank 0 is shown, that of the others kept in files of `folder`.
    saves: whether ranks that train save when this process is killed."""

    in_doubt = False  # whether processes may be about to be lost

    def __init__(self, folder: Path, preload: tuple[str, ...], saves: bool = True) -> None:
        self.alive: dict[int, Process] = {}
        self._buried: list[Process] = []
        self._asked: dict[int, Wire] = {}  # by rank: of processes that are being started
        self._folder, self._preload, self._saves = folder, preload, saves
        self._store, self._store_port = None, 0
        self._num_unready = 0  # servers in a row that have not been ready
        self._pipe = os.pipe()  # whoever is started ends when nobody has the second end any more
        self._begin_with(*(early.take() or _started_server()))

    def _begin_with(self, server: Popen[bytes] | early.ForkedServer, control: Wire) -> None:
        self._server, self.control, self._num_unready = server, control, self._num_unready + 1
        handles = {process.rank: process.handle for process in self.alive.values() if process.code is None}
        if self._store is not None:
            handles[STORE] = self._store
        adopted = [(rank, handle) for rank, handle in handles.items() if handle is not None and handle.descriptor]
        adopted = adopted[:MOST_ADOPTED]
        begin = Begin(
            self._preload, str(self._folder), self._saves, tuple((handle.pid, rank) for rank, handle in adopted)
        )
        self._say(begin, (*self._pipe, *(handle.descriptor for _, handle in adopted if handle.descriptor)))

    def _say(self, message: Any, descriptors: tuple[int, ...] = ()) -> None:
        with suppress(ConnectionError):  # where the server is gone, another is asked for the same
            self.control.send(message, descriptors)

    @property
    def lost_store(self) -> bool:
        """Whether the process is gone that holds the store of the ranks on this machine."""
        return self._store is not None and self._store.gone

    def store_ends_within(self, seconds: float) -> bool:
        return self._store is not None and self._store.ends_within(seconds)

    def host_store(self) -> int:
        """The port of a store on this machine; another process holds one where the last is gone."""
        if self.lost_store:
            self._end_store()
        if self._store is None:
            self._say(Host())
            self._until(lambda: self._store is not None, lambda: self._say(Host()))
        return self._store_port

    def _end_store(self) -> None:
        if self._store is not None:
            self._store.send(signal.SIGKILL)
            self._store.ends_within(_END_SECONDS)
            self._store.close()
            self._store = None

    def start(self, num_ranks: int) -> None:
        """Have ranks 0 … num_ranks-1, other processes for those that are gone since the last job."""
        for rank in [rank for rank, process in self.alive.items() if process.gone]:
            self.bury(rank)
        self._start([rank for rank in range(num_ranks) if rank not in self.alive])

    def _start(self, missing: Sequence[int]) -> None:
        def ask() -> None:
            for rank in [*self._asked] or missing:
                self._ask(rank)

        ask()
        self._until(lambda: not self._asked, ask)

    def _ask(self, rank: int) -> None:
        if rank in self._asked:
            self._asked[rank].close()  # a process that has its other end leaves
        end, theirs = socket.socketpair()
        log = self._log(rank)
        self._asked[rank] = Wire(end)
        self._say(Fork(rank, str(log) if log else ""), (theirs.fileno(),))
        theirs.close()

    def _until(self, answered: Callable[[], bool], ask: Callable[[], None]) -> None:
        """Waits for the server's answer; asks again the one that takes its place."""
        deadline, most = time.monotonic() + _START_SECONDS, self._num_unready + _MORE_SERVERS - 1
        while not answered():
            self._hear()
            if self._replaced_server(most):
                ask()
            elif self._server.poll() is not None or time.monotonic() > deadline:
                raise RankError("the process that starts ranks ended or does not answer", "its output is above")
            if not answered():
                time.sleep(0.002)

    def _hear(self) -> None:
        """What the server says."""
        for message in self.control.take():
            if isinstance(message, Ready):
                self._num_unready = 0
            elif isinstance(message, Forked):
                wire, log = self._asked.pop(message.rank), self._log(message.rank)
                self.alive[message.rank] = Process(message.rank, message.pid, wire, log)
            elif isinstance(message, Hosted):
                self._store, self._store_port = Handle(message.pid), message.port
            elif isinstance(message, Ended):
                self._note(message)

    def _replaced_server(self, most_unready: int = 0) -> bool:
        """Starts another server where it ended, unless it is one of more in a row than these that were not ready."""
        if (code := self._server.poll()) is None:
            return False
        self._hear()
        if self._num_unready > most_unready:
            return False
        how = how_it_ended(code)
        print(f"the process that starts ranks {how}; another takes its place", file=sys.stderr, flush=True)
        for process in (*self.alive.values(), *self._buried):
            process.is_orphan = True
        self.control.close()
        self._begin_with(*_started_server())
        return True

    def can_start(self, rank: int) -> bool:
        """Whether there is a place for it."""
        return True

    def hears_of(self, rank: int) -> bool:
        """Whether what it shows is known here; else its silence is that of its machine."""
        return True

    def start_one(self, rank: int) -> None:
        """A process in the place of one that was buried."""
        self._start([rank])

    def bury(self, rank: int) -> None:
        """Kill a rank if it still lives, and wait until it is gone. What it said last can still be heard."""
        process = self.alive.pop(rank)
        self._buried.append(process)
        deadline = time.monotonic() + _END_SECONDS
        process.send(signal.SIGKILL)
        while not process.gone and time.monotonic() < deadline:
            time.sleep(0.001)
            self.note_ended()

    def note_ended(self) -> None:
        """Learn which ranks are gone; they stay in `alive` with their code until `end` is called."""
        for process in self.alive.values():
            process.look()
        self._hear()
        self._replaced_server()

    def _note(self, ended: Ended) -> None:
        for process in (*self.alive.values(), *self._buried):
            if process.pid == ended.pid:
                process.code = ended.code

    def end(self) -> None:
        """Kill every rank and wait until they are gone."""
        deadline = time.monotonic() + _END_SECONDS
        for process in self.alive.values():
            process.send(signal.SIGKILL)
        while not all(process.gone for process in self.alive.values()) and time.monotonic() < deadline:
            time.sleep(0.002)
            self.note_ended()
        for process in (*self.alive.values(), *self._buried):
            process.close()
        self.alive.clear()
        self._buried.clear()

    def close(self) -> None:
        """End the ranks, the store and the server."""
        self.end()
        self._end_store()
        self._say(End())
        self._hear()
        self.control.close()
        self._end_server()
        for end in self._pipe:
            os.close(end)

    def _end_server(self) -> None:
        """One that is stopped could not hear that it is no longer needed; one that still imports has nothing to end."""
        self._server.send_signal(signal.SIGKILL if self._num_unready else signal.SIGCONT)
        try:
            self._server.wait(5.0)
        except TimeoutExpired:
            self._server.kill()
            self._server.wait()

    def _log(self, rank: int) -> Path | None:
        return self._folder / f"rank-{rank}.log" if rank else None


def _started_server() -> tuple[Popen[bytes], Wire]:
    ours, theirs = socket.socketpair()
    code = f"from phalanx.launch.server import main; main({theirs.fileno()})"
    path = os.pathsep.join(part or os.getcwd() for part in sys.path)
    # A session of its own keeps the terminal's Ctrl-C away from the ranks: who started them decides.
    started = Popen(
        [sys.executable, "-c", code], stdin=DEVNULL, pass_fds=[theirs.fileno()], start_new_session=True,
        env={**os.environ, **torch_defaults(os.environ), "PYTHONPATH": path},
    )  # fmt: skip
    theirs.close()
    return started, Wire(ours)
