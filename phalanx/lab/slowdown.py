"""A rank that gets less of the processor than it could use: by a quota where control groups can be written, else by
busy neighbours on its cores.

A quota takes time from this rank alone and is exact; neighbours take it from everyone on those cores, in steps of a
half, a third, a quarter. `how` says which one it is.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from phalanx.lab.owned import PREFIX, is_abandoned

LEAST_PERCENT = 5
_PERIOD_MICROSECONDS = 20_000  # short against a training step, and the smallest share is above the kernel's least quota
_V2, _V1 = Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/cpu")


class Slowdown(Protocol):
    """A rank is slow as long as this has not ended."""

    how: str

    def end(self) -> None: ...


def slow_down(name: str, pids: list[int], cores: tuple[int, ...], percent: int) -> Slowdown:
    """Leave the processes `percent` of their cores' time. `name` tells this slowdown from others on this machine."""
    hierarchy = _find_hierarchy()
    if hierarchy is not None:
        with suppress(OSError):
            return Quota(hierarchy, name, pids, len(cores), percent)
    return Neighbours(cores, percent)


def sweep() -> None:
    """Remove the control groups of labs whose process is gone (their ranks went with it)."""
    for group in (*_V2.glob(f"{PREFIX}.*"), *_V1.glob(f"{PREFIX}.*")):
        if is_abandoned(group.name):
            with suppress(OSError):
                group.rmdir()


@dataclass(frozen=True)
class Hierarchy:
    """Where control groups with a CPU quota can be made, and how they are written."""

    root: Path
    own_group: Callable[[int], str]  # of a process, below the root
    limits: Callable[[int], dict[str, str]]  # file → content, for a quota per period


class Quota:
    """A control group that holds a rank's processes, and those they start."""

    def __init__(self, hierarchy: Hierarchy, name: str, pids: list[int], num_cores: int, percent: int) -> None:
        self._group = hierarchy.root / name
        self._before = {pid: hierarchy.root / hierarchy.own_group(pid).lstrip("/") for pid in pids}
        self.how = f"quota of {percent}% of {num_cores} core{'s' if num_cores > 1 else ''}"
        self._group.mkdir()
        try:
            for file, content in hierarchy.limits(_PERIOD_MICROSECONDS * num_cores * percent // 100).items():
                (self._group / file).write_text(content)
            for pid in pids:
                (self._group / "cgroup.procs").write_text(str(pid))
        except OSError:
            self.end()
            raise

    def end(self) -> None:
        for pid, group in self._before.items():
            with suppress(OSError):
                (group / "cgroup.procs").write_text(str(pid))
        with suppress(OSError):  # a process that the rank started since goes with it; the next sweep removes the rest
            self._group.rmdir()


class Neighbours:
    """Processes that do nothing but compute, on the rank's cores."""

    def __init__(self, cores: tuple[int, ...], percent: int) -> None:
        per_core = max(1, round(100 / percent) - 1)
        named = f"{per_core} busy neighbours" if per_core > 1 else "a busy neighbour"
        self.how = f"{named} on each of its cores, leaving about {100 // (per_core + 1)}%"
        # A session each: the scheduler may share the processor between sessions, not between processes.
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-S", "-c", _SPIN, str(core), str(os.getpid())], start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )
            for core in cores for _ in range(per_core)
        ]  # fmt: skip

    def end(self) -> None:
        for process in self._processes:
            process.send_signal(signal.SIGKILL)
            process.wait()


# Looks at its parent now and then, so that it never outlives the lab.
_SPIN = """
import os, sys
os.sched_setaffinity(0, {int(sys.argv[1])})
while os.getppid() == int(sys.argv[2]):
    for _ in range(1000000):
        pass
"""


def _find_hierarchy() -> Hierarchy | None:
    period = str(_PERIOD_MICROSECONDS)
    with suppress(OSError):
        if "cpu" in (_V2 / "cgroup.subtree_control").read_text().split() and os.access(_V2, os.W_OK):
            return Hierarchy(_V2, _own_group("0", ""), lambda quota: {"cpu.max": f"{quota} {period}"})
    if (_V1 / "cgroup.procs").exists() and os.access(_V1, os.W_OK):
        return Hierarchy(
            _V1, _own_group("", "cpu"), lambda quota: {"cpu.cfs_period_us": period, "cpu.cfs_quota_us": str(quota)}
        )
    return None


def _own_group(number: str, controller: str) -> Callable[[int], str]:
    def find(pid: int) -> str:
        for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
            hierarchy, controllers, group = line.split(":", 2)
            if (hierarchy == number) if number else (controller in controllers.split(",")):
                return group
        return "/"

    return find
