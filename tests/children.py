"""Processes that tests start: they find this checkout first, then whatever the tests were started with.

A Python that would import torch is forked from one that has (`zygote.py`): `Popen` and `run` are subprocess's, seconds
cheaper. What is tested about imports, or about how a process is started, uses subprocess itself.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import queue
import socket
import subprocess
import sys
import threading
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
_COMMANDS = ("phalanx.cli.main", "phalanx.verification.verify")
_one_at_a_time = threading.Lock()
_SUBREAPER = 36  # prctl's word for: orphans among our descendants become our children


def environment(**variables: str) -> dict[str, str]:
    paths = [str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **variables}


class _Forked(subprocess.Popen[str]):
    """`[sys.executable, …]` as a fork of the zygote. It is a child of this process, like any other."""

    def _execute_child(
        self, args: Any, executable: Any, preexec_fn: Any, close_fds: Any, pass_fds: Any, cwd: Any, env: Any,
        startupinfo: Any, creationflags: Any, shell: Any, p2cread: int, p2cwrite: int, c2pread: int, c2pwrite: int,
        errread: int, errwrite: int, restore_signals: Any, gid: Any, gids: Any, uid: Any, umask: Any,
        start_new_session: bool, process_group: Any,
    ) -> None:  # fmt: skip
        assert args[0] == sys.executable and preexec_fn is None, args
        given = {0: p2cread, 1: c2pwrite, 2: errwrite}
        wanted = {**{to: to if at == -1 else at for to, at in given.items()}, **{at: at for at in pass_fds}}
        request = {
            "line": [str(word) for word in args[1:]], "environment": dict(os.environ if env is None else env),
            "folder": str(cwd or os.getcwd()), "new_session": start_new_session, "descriptors": list(wanted),
            "parent": os.getpid(),
        }  # fmt: skip
        prctl = ctypes.CDLL(None).prctl
        with _one_at_a_time:
            control, _ = _zygote()
            prctl(_SUBREAPER, 1)  # for this moment: orphans of what is tested are nobody's
            socket.send_fds(control, [json.dumps(request).encode()], list(wanted.values()))
            self.pid = int(control.recv(64))
            prctl(_SUBREAPER, 0)
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)


Popen = _Forked if sys.platform == "linux" else subprocess.Popen


def run(line: list[str], timeout: float | None = None, **options: Any) -> subprocess.CompletedProcess[str]:
    """The process's exit code and all that it said."""
    with Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(line, process.returncode, out, err)


@cache
def _zygote() -> tuple[socket.socket, int]:
    """What it is asked by, and the number that it was told to hear by."""
    from phalanx.launch.worker_pool import PRELOAD

    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    line = [sys.executable, str(ROOT / "tests" / "zygote.py"), str(theirs.fileno()), *PRELOAD, *_COMMANDS]
    started: queue.Queue[subprocess.Popen[bytes]] = queue.Queue()

    def hold() -> None:
        """The zygote is killed when the thread ends that started it, which may be one of a test's."""
        own = subprocess.Popen(line, pass_fds=[theirs.fileno()], env=environment(OMP_NUM_THREADS="1"))
        started.put(own)
        own.wait()

    threading.Thread(target=hold, daemon=True).start()
    process, number = started.get(timeout=60), theirs.fileno()
    theirs.close()
    atexit.register(lambda: (ours.close(), process.wait()))
    return ours, number
