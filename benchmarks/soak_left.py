"""What a run of the soak may leave behind: no process, no listening port, no shared memory, few open files."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from soak_checks import runs

from phalanx.launch.worker_pool import WorkerPool

LOOKED_FOR = ("processes", "ports")  # noted with every run, since the first runs were not looked through for these
_MARK = "PHALANX_SOAK_RUN"  # a variable that processes hand on to those that they start, whoever adopts these
_GOING = 10.0  # seconds that killed processes may take to be gone
_LISTENING = "0A"  # as the kernel writes it
_FILES = 40  # that an idle rank may have open; it has some ten


@contextlib.contextmanager
def marked(run: str) -> Iterator[None]:
    """Within it every process that is started has the mark of a run."""
    os.environ[_MARK] = run
    try:
        yield
    finally:
        del os.environ[_MARK]


def processes_of(run: str) -> set[int]:
    """That have its mark and run."""
    sought, found = f"{_MARK}={run}\0".encode(), set[int]()
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if sought in path.read_bytes() and runs(int(path.parent.name)):
                found.add(int(path.parent.name))
    return found


def listening(pid: int) -> set[int]:
    """Ports where a process waits for connections."""
    own, found = _sockets(pid), set[int]()
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
                _, local, _, state, *_, inode = line.split()[:10]
                if state == _LISTENING and inode in own:
                    found.add(int(local.rpartition(":")[2], 16))
    return found


def _sockets(pid: int) -> set[str]:
    """By their numbers in the kernel."""
    found: set[str] = set()
    with contextlib.suppress(OSError):
        for path in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                kind, _, number = os.readlink(path).partition(":")
                if kind == "socket":
                    found.add(number.strip("[]"))
    return found


def beside_ranks(pool: WorkerPool, run: str, timeout: float) -> list[str]:
    """What there is, when a run has ended, besides idle ranks and what starts them: processes; ports of ranks. These
    are closed when ranks have told what came of the run. timeout: of that, after which a rank gives up to connect to
    one that is lost."""
    processes: Any = pool.processes
    ranks, deadline = set(pool.pids.values()), time.monotonic() + timeout + _GOING
    while True:
        others = processes_of(run) - ranks - {processes._server.pid, processes._store.pid}
        ports = [found for pid in ranks if (found := listening(pid))]
        if not (others or ports) or time.monotonic() > deadline:
            break
        time.sleep(0.02)
    return [
        *(f"{name(pid)} ran on beside the idle ranks" for pid in sorted(others)),
        *(f"an idle rank listens on {len(found)} ports" for found in ports),
    ]


def left_running(run: str, seconds: float = _GOING) -> list[str]:
    """At its very end; what is left is ended."""
    deadline = time.monotonic() + seconds
    while (left := processes_of(run)) and time.monotonic() < deadline:
        time.sleep(0.02)
    said = [f"{name(pid)} was left running" for pid in sorted(left)]
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return said


def name(pid: int) -> str:
    with contextlib.suppress(OSError):
        return f"process {pid} ({Path(f'/proc/{pid}/comm').read_text().strip()})"
    return f"process {pid}"


def most_open_files(pids: Sequence[int]) -> int:
    """Of ranks that still run."""
    counts = [0]
    for pid in pids:
        with contextlib.suppress(OSError):
            counts.append(len(os.listdir(f"/proc/{pid}/fd")))
    return max(counts)


def left_open(num_files: int, num_losses: int) -> list[str]:
    """However many ranks were lost."""
    return [f"a rank has {num_files} open files after {num_losses} losses"] if num_files > _FILES else []


def shared_memory() -> set[str]:
    """Pieces of it whose makers are gone: torch names each after the process that made it."""
    names = [name for name in os.listdir("/dev/shm") if name.startswith("torch_")]
    return {name for name in names if not runs(int(name.split("_")[1]))}
