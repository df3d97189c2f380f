"""A process that has imported what ranks import, and forks whenever a test would start a Python: the fork is what was
asked for, seconds earlier. Started as a script by `children.py`, with the descriptor of a socket.

Nothing is computed here, so forks begin as fresh interpreters do, but for the modules that are there already.
"""

from __future__ import annotations

import array
import atexit
import ctypes
import fcntl
import gc
import importlib
import json
import os
import runpy
import socket
import sys
import tempfile
import threading
import time
import types
from pathlib import Path

# What compares a capture with the plain model: tests/model and tests/parity do that.
UNCHECKED = (("phalanx.model.capture", "self_check"), ("phalanx.prepare.read_model", "prove"))
MOST_BYTES, MOST_DESCRIPTORS = 1 << 20, 16
# Descriptors from here on, and the socket we hear requests by, are above any number that a request names.
_APART, _CONTROL = 256, 512
_KILL, _PARENT_DEATH_SIGNAL = 9, 1


def serve(control: socket.socket) -> dict:
    """What to become. Returns in forks only: this process ends when nobody asks any more."""
    while True:
        asked, descriptors, _, _ = socket.recv_fds(control, MOST_BYTES, MOST_DESCRIPTORS)
        if not asked:
            os._exit(0)
        request = json.loads(asked)
        between = os.fork()
        if between == 0:
            if os.fork():
                os._exit(0)  # whoever asked becomes the parent of what has none
            _settle(request, descriptors)
            control.send(str(os.getpid()).encode())
            control.close()
            return request
        os.waitpid(between, 0)
        for descriptor in descriptors:
            os.close(descriptor)


def _settle(request: dict, descriptors: array.array | list[int]) -> None:
    """Descriptors, environment and folder as they were asked for."""
    while os.getppid() != request["parent"]:
        time.sleep(0.0005)
    apart = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, _APART) for descriptor in descriptors]
    for descriptor in descriptors:
        os.close(descriptor)
    for descriptor, wanted in zip(apart, request["descriptors"], strict=True):
        os.dup2(descriptor, wanted)
        os.close(descriptor)
    if request["new_session"]:
        os.setsid()
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    tempfile.tempdir = None


def become(line: list[str]) -> None:
    """As `python LINE` does: -c CODE, -m MODULE or SCRIPT, and arguments."""
    from phalanx.launch import early

    main = sys.modules["__main__"] = sys.modules["__mp_main__"] = types.ModuleType("__main__")
    first, *arguments = line
    if first not in ("-m", "-c"):  # a script's fork server is a fork, too; the command makes its own of itself
        early._waiting.append(early._forked())
    found = [*filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), *_path]
    if first == "-m":
        sys.path[:], sys.argv = [os.getcwd(), *found], arguments
        runpy._run_module_as_main(arguments[0])
    elif first == "-c":
        sys.path[:], sys.argv = ["", *found], [first, *arguments[1:]]
        exec(compile(arguments[0], "<string>", "exec"), vars(main))
    else:
        sys.path[:], sys.argv, main.__file__ = [os.path.dirname(os.path.abspath(first)), *found], line, first
        exec(compile(Path(first).read_bytes(), first, "exec"), vars(main))


def end(code: int) -> None:
    """As Python does, but for taking the interpreter apart: that touches, and so copies, all that forks share."""
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, _KILL)
    _path = [path for path in sys.path[1:] if path not in os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    gc.disable()
    for name in sys.argv[2:]:
        importlib.import_module(name)
    for module, name in UNCHECKED:
        setattr(sys.modules[module], name, lambda *arguments: "")
    gc.enable()
    gc.freeze()
    control = socket.socket(fileno=fcntl.fcntl(int(sys.argv[1]), fcntl.F_DUPFD_CLOEXEC, _CONTROL))
    os.close(int(sys.argv[1]))
    request = serve(control)
    try:
        become(request["line"])
    except SystemExit as leaving:
        if not isinstance(leaving.code, int | None):
            raise
        end(leaving.code or 0)
    end(0)
