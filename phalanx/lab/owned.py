"""Names of things that can outlive the process that made them: each name says who that was.

So the next lab can tell what a dead one left behind from what a living one uses, without a daemon and without a file to
keep in step.
"""

from __future__ import annotations

import os
import re
import secrets
from pathlib import Path

PREFIX = "phalanx-lab"


def new_name() -> str:
    """A name that no other lab has, of this process or another."""
    pid = os.getpid()
    return f"{PREFIX}.{_pid_namespace()}.{pid}.{_started(pid)}.{secrets.token_hex(3)}"


def is_abandoned(name: str) -> bool:
    """Whether what bears this name was made by a process that is gone."""
    found = re.match(rf"{re.escape(PREFIX)}\.(\d+)\.(\d+)\.(\d+)\.[0-9a-f]+", name)
    if found is None or int(found[1]) != _pid_namespace():
        return False  # of a container whose processes cannot be seen from here
    return _started(int(found[2])) != int(found[3])


def _pid_namespace() -> int:
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def _started(pid: int) -> int:
    """When a process started, in ticks since boot: numbers of processes are used again. 0 when there is none."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        return 0
