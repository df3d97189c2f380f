"""Local rank processes: started from the fork server, spoken to over wires, signalled and ended.

It knows nothing of jobs; worker_pool.py does.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from subprocess import DEVNULL, Popen, TimeoutExpired
from typing import Any

from phalanx.errors import RankError
from phalanx.launch import early
from phalanx.launch.server import Begin, End, Ended, Fork, Forked, Hosted
from phalanx.launch.torch_defaults import torch_defaults
from phalanx.launch.wire import Wire

_START_SECONDS = 120.0
_END_SECONDS = 10.0
_ENDING, _STATUS = ("Z", "X"), 49  # of /proc/…/stat: states in which no thread runs, and where the status stands


@dataclass
class Process:
    """One rank's process; `code` is None as long as it lives, then its exit code or minus the signal."""

    rank: int
    pid: int
    wire: Wire
    log: Path | None
    code: int | None = None
    cause: str = ""  # what happened to it, where that is known better than by its code
    handle: int | None = None  # of the process itself, where the system has such: its number may come to mean another

    def __post_init__(self) -> None:
        if hasattr(os, "pidfd_open"):
            with suppress(ProcessLookupError):
                self.handle = os.pidfd_open(self.pid)

    @property
    def stopped(self) -> bool:
        """Whether it was stopped by a signal (SIGSTOP) and can do nothing."""
        return _seen(self.pid)[0] == "T"

    @property
    def how_ended(self) -> str:
        """Once it is gone: 'was killed by signal SIGKILL'."""
        if self.cause or self.code is None:
            return self.cause or "ended"
        return f"was killed by signal {signal.Signals(-self.code).name}" if self.code < 0 else (
            f"left with exit code {self.code}"
        )  # fmt: skip

    def look(self) -> None:
        """Takes note if it will never run again. Its parent learns so only when all that it had is given back, which
        takes most of a second where it had the memory of a GPU."""
        state, status = _seen(self.pid) if self.code is None else ("", 0)
        if state in _ENDING:
            self.code = os.waitstatus_to_exitcode(status)

    @property
    def gone(self) -> bool:
        """Whether it has ended, as far as can be seen from here."""
        self.look()
        if self.code is not None or self.handle is None:
            return self.code is not None
        poll = select.poll()
        poll.register(self.handle, select.POLLIN)
        return bool(poll.poll(0))

    def send(self, number: int) -> None:
        """Without the fork server, which may itself be stopped."""
        with suppress(ProcessLookupError):
            if self.code is None and self.handle is not None:
                signal.pidfd_send_signal(self.handle, number)
            elif self.code is None:
                os.kill(self.pid, number)

    def hand(self, job: Any, descriptors: tuple[int, ...]) -> None:
        """A job, with the files that belong to it."""
        self.wire.send(job, descriptors)

    def close(self) -> None:
        self.wire.close()
        if self.handle is not None:
            os.close(self.handle)

    def last_output(self, num_lines: int = 20) -> list[str]:
        """What it wrote last, where that was not shown."""
        if self.log is None or not self.log.exists():
            return []
        with self.log.open("rb") as file:
            file.seek(max(0, self.log.stat().st_size - 16384))
            lines = file.read().decode(errors="replace").splitlines()[-num_lines:]
        return [line[:200] for line in lines]


class Processes:
    """The fork server and its children. Output of rank 0 is shown, that of the others kept in files of `folder`.
    saves: whether ranks that train save when this process is killed."""

    in_doubt = False  # whether processes may be about to be lost

    def __init__(self, folder: Path, preload: tuple[str, ...], saves: bool = True) -> None:
        self.alive: dict[int, Process] = {}
        self._buried: list[Process] = []
        self._folder, self._store, self._lost_store = folder, Hosted(0, 0), False
        self._server, self.control = early.take() or _started_server()
        self.control.send(Begin(preload, str(folder), saves))

    @property
    def broken(self) -> str:
        """Which process is gone that no rank can do without, "" if there is none."""
        if self._server.poll() is not None:
            return "the process that starts ranks"
        return "the process that holds the store of the ranks" if self._lost_store else ""

    @property
    def store_port(self) -> int:
        """Of the store on this machine, once ranks were started."""
        return self._store.port

    def start(self, num_ranks: int) -> None:
        """Have ranks 0 … num_ranks-1."""
        self._start([rank for rank in range(num_ranks) if rank not in self.alive])

    def _start(self, missing: Sequence[int]) -> None:
        ours: dict[int, Wire] = {}
        for rank in missing:
            end, theirs = socket.socketpair()
            log = self._log(rank)
            self.control.send(Fork(rank, str(log) if log else ""), (theirs.fileno(),))
            theirs.close()
            ours[rank] = Wire(end)
        deadline = time.monotonic() + _START_SECONDS
        while ours:
            for message in self.control.take():
                if isinstance(message, Forked):
                    wire = ours.pop(message.rank)
                    self.alive[message.rank] = Process(message.rank, message.pid, wire, self._log(message.rank))
                elif isinstance(message, Hosted):
                    self._store = message
                elif isinstance(message, Ended):
                    self._note(message)
            if self._lost_store or self.control.closed or time.monotonic() > deadline:
                raise RankError("the process that starts ranks ended or does not answer", "its output is above")
            if ours:
                time.sleep(0.002)

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
        for message in self.control.take():
            if isinstance(message, Ended):
                self._note(message)

    def _note(self, ended: Ended) -> None:
        self._lost_store = self._lost_store or ended.pid == self._store.pid
        for process in (*self.alive.values(), *self._buried):
            if process.pid == ended.pid:
                process.code = ended.code

    def deliver(self, number: int) -> None:
        """Send a signal to every rank."""
        for process in self.alive.values():
            process.send(number)

    def end(self) -> None:
        """Kill every rank and wait until they are gone."""
        deadline = time.monotonic() + _END_SECONDS
        self.deliver(signal.SIGKILL)
        while not all(process.gone for process in self.alive.values()) and time.monotonic() < deadline:
            time.sleep(0.002)
            self.note_ended()
        for process in (*self.alive.values(), *self._buried):
            process.close()
        self.alive.clear()
        self._buried.clear()

    def close(self) -> None:
        """End the ranks and the server."""
        self.end()
        with suppress(ConnectionError):  # it may be gone
            self.control.send(End())
        self.control.close()
        self._server.send_signal(signal.SIGCONT)  # one that is stopped could not hear that it is no longer needed
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


def _seen(pid: int) -> tuple[str, int]:
    """The kernel's letter for what a process does, and the status with which it ended; "" where they are unknown."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", 0
    return fields[0], int(fields[_STATUS])


def memory_kills() -> dict[str, int]:
    """How many processes the kernel has ended for lack of memory, in our control group and on the whole machine, as far
    as it says so."""
    found: dict[str, int] = {}
    for place, file in (("control group", _memory_events), ("machine", lambda: Path("/proc/vmstat"))):
        with suppress(OSError, KeyError, ValueError):
            found[place] = int(dict(line.split() for line in file().read_text().splitlines())["oom_kill"])
    return found


def _memory_events() -> Path:
    """The counters of this process's control group; of version 1 of them, where that is what there is."""
    groups = (line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines())
    places = {controllers: path.lstrip("/") for _, controllers, path in groups}
    root = Path("/sys/fs/cgroup")
    if "memory" in places:
        return root / "memory" / places["memory"] / "memory.oom_control"
    return root / places.get("", "") / "memory.events"
