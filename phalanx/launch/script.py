"""Starts a script of the user's own as several local ranks, in which `phalanx.open` and `phalanx.train` join.

It does what torchrun does on one machine, and no more: every process finds its place in the environment, writes to this
terminal, and all end when one fails. On several machines torchrun, SLURM or MPI start ranks.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from phalanx.errors import ConfigError
from phalanx.launch.signals import StopSignal, stop_signal

_TICK_SECONDS = 0.1
_LEAVE_SECONDS = 15.0  # for ranks to find out, and say, why another one failed


def launch_script(script: str, arguments: Sequence[str], ranks: int) -> int:
    """The exit code: 0, or that of the first rank that failed."""
    if not Path(script).is_file():
        raise ConfigError(f"there is no script {script!r}", "give the path of a Python file")
    port = _free_port()
    with stop_signal() as stop:
        processes = [_start([sys.executable, script, *arguments], rank, ranks, port) for rank in range(ranks)]
        try:
            code = _wait(processes, stop)
        finally:
            _end(processes)
    if stop.signals:
        raise KeyboardInterrupt if stop.signals[0] == signal.SIGINT else SystemExit(128 + stop.signals[0])
    return code


def _start(command: list[str], rank: int, world: int, port: int) -> subprocess.Popen[bytes]:
    place = {
        "RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world,
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
    }  # fmt: skip
    threads = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // world))}
    return subprocess.Popen(command, env={**threads, **os.environ, **{k: str(v) for k, v in place.items()}})


def _wait(processes: Sequence[subprocess.Popen[bytes]], stop: StopSignal) -> int:
    """Until all have ended, or a while after one has failed. A terminal tells all of them to stop, who sends SIGTERM
    often only this process."""
    deadline, failed, passed_on = float("inf"), 0, False
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        if signal.SIGTERM in stop.signals and not passed_on:
            passed_on = True
            _send(processes, signal.SIGTERM)
        stop.require_patience()
        failed = failed or next((code for process in processes if (code := process.poll())), 0)
        if failed and deadline == float("inf"):
            deadline = time.monotonic() + _LEAVE_SECONDS
        time.sleep(_TICK_SECONDS)
    codes = [process.poll() for process in processes]
    failed = failed or next((code for code in codes if code), 0)
    return failed if failed >= 0 else 128 - failed


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for signal_ in (signal.SIGTERM, signal.SIGKILL):
        running = _send(processes, signal_)
        deadline = time.monotonic() + 5.0
        while any(process.poll() is None for process in running) and time.monotonic() < deadline:
            time.sleep(_TICK_SECONDS)


def _send(processes: Sequence[subprocess.Popen[bytes]], number: int) -> list[subprocess.Popen[bytes]]:
    """To those that run, which are these."""
    running = [process for process in processes if process.poll() is None]
    for process in running:
        process.send_signal(number)
    return running


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]
