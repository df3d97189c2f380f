"""One run, one folder: a lock that says who trains there, and what becomes of one whose process is gone.

The lock is a file with the holder's host, process and time of start, and a count that the holder raises every few
seconds. A process of this machine can be seen to be gone, and its lock is taken over at once. One of another machine is
gone when its count stands still; until that is known the new run waits. A job that was requeued waits for its earlier
self. Who held a lock and slept through its loss finds out before it completes a checkpoint (`still_ours`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Self

from phalanx.errors import CheckpointError, ConfigError
from phalanx.records import Malformed, read_record

LOCK_FILE = ".lock"
_BEAT_SECONDS = 5.0
_SILENT_SECONDS = 30.0  # after which a holder on another machine is taken for gone
_REQUEUE_SECONDS = 90.0  # for the earlier self of a requeued job to leave
_GUARD_SECONDS = 10.0  # nobody needs longer to look at the file and write it
_LOOK_SECONDS = 0.25


@dataclass(frozen=True)
class Holder:
    """A process that has, or wants, a run folder."""

    host: str
    machine: str  # this start of the machine, and the namespace in which numbers of processes mean something
    pid: int
    started: int  # when the process was, as the kernel counts; tells it from a later one of the same number
    since: str
    job: str  # the scheduler's number of it, "" without one
    token: str
    beat: int = 0

    @classmethod
    def here(cls) -> Holder:
        pid = os.getpid()
        since = datetime.now().astimezone().isoformat(" ", "seconds")
        job = os.environ.get("SLURM_JOB_ID", "")
        return cls(socket.gethostname(), _machine(), pid, _start_time(pid) or 0, since, job, secrets.token_hex(8))

    def __str__(self) -> str:
        job = f", job {self.job}" if self.job else ""
        return f"process {self.pid} on {self.host}{job}, since {self.since}"

    def is_gone(self, seen_by: Holder) -> bool:
        """Whether this process certainly does not exist any more; only its own machine can tell."""
        if self.host != seen_by.host:
            return False
        if self.machine.split()[:1] != seen_by.machine.split()[:1]:
            return True  # the machine was started again since
        return self.machine == seen_by.machine and _start_time(self.pid) != self.started

    def is_neighbour(self, seen_by: Holder) -> bool:
        """Whether both are seen by one kernel."""
        return (self.host, self.machine) == (seen_by.host, seen_by.machine)


class RunLock:
    """This process's hold on a run folder; use it in a `with` statement. `say` is told what the user must know."""

    def __init__(self, folder: Path, say: Callable[[str], None] = lambda text: None) -> None:
        self._folder, self._path, self._say = folder, folder / LOCK_FILE, say
        self._self = Holder.here()
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._keep_beating, name="run-lock", daemon=True)

    def __enter__(self) -> Self:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._acquire()
        except OSError as error:
            raise ConfigError(
                f"the run folder {self._folder} cannot be used: {error.strerror or error}",
                "choose another folder (--out)",
            ) from None
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._left.set()
        self._thread.join()
        with contextlib.suppress(OSError), _guarded(self._path) as file:
            if _is(_read(file), self._self):
                self._path.unlink()

    def still_ours(self) -> None:
        """Raises if another run has taken the folder over."""
        holder = read_holder(self._folder)
        if not _is(holder, self._self):
            raise CheckpointError(
                f"the run folder {self._folder} is no longer this run's: "
                + (f"{holder} has taken it over" if holder else "its lock was removed"),
                "this run was silent for too long; let the other one go on, nothing of it was overwritten",
            )

    def _acquire(self) -> None:
        watched, waited = None, False
        began = since = time.monotonic()
        while True:
            with _guarded(self._path) as file:
                holder = _read(file)
                moved = holder != watched is not None
                if holder != watched:
                    watched, since = holder, time.monotonic()
                if holder is None or (reason := self._why_gone(holder, time.monotonic() - since)):
                    if holder is not None:
                        self._say(f"taking over the run folder {self._folder} from {holder}: {reason}")
                    _write(file, self._self)
                    return
            lives = moved or holder.is_neighbour(self._self)
            if lives and not self._awaits(holder, time.monotonic() - began):
                raise in_use(self._folder, holder)
            if not waited:
                self._say(f"the run folder {self._folder} is held by {holder}; waiting to see whether that run lives")
            waited = True
            time.sleep(_LOOK_SECONDS)

    def _why_gone(self, holder: Holder, silent: float) -> str:
        """Why a holder is taken for gone, "" if it is not."""
        if holder.is_gone(self._self):
            return "that process is gone"
        if not holder.is_neighbour(self._self) and silent >= _SILENT_SECONDS:
            return f"it has shown no sign of life for {silent:.0f} s"
        return ""

    def _awaits(self, holder: Holder, seconds: float) -> bool:
        """Whether the holder is this job before it was requeued, and still has time to leave."""
        return holder.job == self._self.job != "" and seconds < _REQUEUE_SECONDS

    def _keep_beating(self) -> None:
        while not self._left.wait(_BEAT_SECONDS):
            # A beat that could not be written is one of many.
            with contextlib.suppress(OSError), _guarded(self._path) as file:
                if _is(_read(file), self._self):
                    self._self = dataclasses.replace(self._self, beat=self._self.beat + 1)
                    _write(file, self._self)


def read_holder(folder: Path) -> Holder | None:
    """Who has a run folder, None if nobody has or the lock cannot be read."""
    try:
        return read_record(Holder, (folder / LOCK_FILE).read_bytes())
    except (OSError, Malformed):
        return None


def refuse_second_run(folder: Path) -> None:
    """A quick look before anything is started: raises if a process of this machine trains in the folder."""
    holder, here = read_holder(folder), Holder.here()
    if holder is None or holder.is_gone(here) or (here.job and holder.job == here.job):
        return
    if holder.is_neighbour(here):
        raise in_use(folder, holder)


def in_use(folder: Path, holder: Holder | None) -> ConfigError:
    return ConfigError(
        f"the run folder {folder} is in use by {holder}",
        "wait until that run ends or stop it, or choose another folder (--out)",
    )


def _is(holder: Holder | None, other: Holder) -> bool:
    return holder is not None and holder.token == other.token


@contextlib.contextmanager
def _guarded(path: Path) -> Iterator[int]:
    """The open file, alone in the hands of this process for a moment, as far as the file system can do that."""
    deadline = time.monotonic() + _GUARD_SECONDS
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            if not _flocked(file) or _is_at(file, path):
                yield file
                return
        finally:
            os.close(file)
        if time.monotonic() > deadline:
            raise TimeoutError(110, f"{path} is held by another process for {_GUARD_SECONDS:.0f} s")
        time.sleep(0.01)


def _flocked(file: int) -> bool:
    """False where the file system knows no such locks; the record alone must do then."""
    deadline = time.monotonic() + _GUARD_SECONDS
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)
        except OSError:
            return False


def _is_at(file: int, path: Path) -> bool:
    """Whether the open file still is the one of this name: a holder that leaves removes it."""
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False


def _read(file: int) -> Holder | None:
    """What a lock says; one that was never written, or is damaged, is nobody's."""
    try:
        return read_record(Holder, os.pread(file, 1 << 16, 0))
    except Malformed:
        return None


def _write(file: int, holder: Holder) -> None:
    text = json.dumps(dataclasses.asdict(holder)).encode()
    os.pwrite(file, text, 0)
    os.ftruncate(file, len(text))
    os.fsync(file)


def _machine() -> str:
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    return "unknown"


def _start_time(pid: int) -> int | None:
    """When a process was started, in the kernel's ticks; None if it is gone or only waits to be buried."""
    if not Path("/proc/self/stat").exists():
        return 0 if _answers(pid) else None
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def _answers(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
