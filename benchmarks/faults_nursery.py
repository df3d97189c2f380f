"""Runs that `faults.py` strikes, forked from a process that has torch imported: starting one costs no seconds.

A nursery is made before anything else is: what it forks has no connections and no threads of the benchmark's.
"""

from __future__ import annotations

import importlib
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import faults_job


@dataclass
class Child:
    """What of subprocess.Popen a process of the nursery has."""

    pid: int
    said: Path

    @property
    def code(self) -> int | None:
        """Its exit status, below zero the signal that ended it; None as long as it is there."""
        file = _code_file(self.said)
        return int(file.read_text()) if file.exists() else None

    def wait(self, seconds: float = 60.0) -> bool:
        """Whether it ended in time."""
        deadline = time.monotonic() + seconds
        while self.code is None and time.monotonic() < deadline:
            time.sleep(0.05)
        return self.code is not None


class Nursery:
    """Use it in a `with` statement."""

    def __enter__(self) -> Nursery:
        for name in ("phalanx.training.trainer", "transformers.models.gpt2.modeling_gpt2"):
            importlib.import_module(name)
        self._socket, other = socket.socketpair()
        self._pid = os.fork()
        if self._pid == 0:
            self._socket.close()
            _serve(other, _run)
        other.close()
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        os.waitpid(self._pid, 0)

    def start(self, arguments: Sequence[str], variables: Mapping[str, str], said: Path) -> Child:
        said.parent.mkdir(parents=True, exist_ok=True)
        _code_file(said).unlink(missing_ok=True)
        self._socket.sendall(json.dumps([list(arguments), dict(variables), str(said)]).encode() + b"\n")
        return Child(int(self._socket.recv(32)), said)


def _run(arguments: list[str]) -> int:
    """The job, or with its first argument another command of phalanx's, by itself."""
    if arguments[0] == "lab":
        os.execv(sys.executable, [sys.executable, "-m", "phalanx", *arguments])
    return faults_job.main(*arguments)


def _code_file(said: Path) -> Path:
    return said.with_suffix(".code")


def _serve(wire: socket.socket, main: Callable[[list[str]], int]) -> None:
    """Forks what is asked for and notes how each ended, until the one who asks is gone."""
    children: dict[int, Path] = {}
    lines = wire.makefile("r")
    while True:
        ready, _, _ = select.select([wire], [], [], 0.05)
        if ready:
            line = lines.readline()
            if not line:
                break
            arguments, variables, said = json.loads(line)
            pid = os.fork()
            if pid == 0:
                wire.close()
                _become(arguments, variables, said, main)
            children[pid] = Path(said)
            wire.sendall(str(pid).encode())
        _reap(children)
    for pid in children:
        os.kill(pid, signal.SIGKILL)
    os._exit(0)


def _reap(children: dict[int, Path]) -> None:
    for pid, said in list(children.items()):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            code = _code_file(said)
            code.with_suffix(".new").write_text(str(os.waitstatus_to_exitcode(status)))
            code.with_suffix(".new").rename(code)
            del children[pid]


def _become(arguments: list[str], variables: Mapping[str, str], said: str, main: Callable[[list[str]], int]) -> None:
    os.environ.update(variables)
    os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    try:
        code = main(arguments)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        code = 1
    sys.stderr.flush()
    os._exit(code)
