"""A limit to the memory that a process may take: the kernel's, by a control group, where one can be made here; else
this process watches and kills it. Which of both it is, the soak's page says."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

_V1, _V2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
_MORE = 128 << 20  # bytes that a process may take besides what it has


@contextlib.contextmanager
def memory_limit(pid: int) -> Iterator[Callable[[], bool]]:
    """Within it; the function says whether the process is gone, and is to be called again and again."""
    group = _group(f"phalanx-soak-{pid}")
    limit = _resident(pid) + _MORE
    if group is not None:
        (group / "cgroup.procs").write_text(str(pid))

    def check() -> bool:
        if group is None and _resident(pid) > limit:
            os.kill(pid, signal.SIGKILL)
        return _resident(pid) == 0

    try:
        yield check
    finally:
        if group is not None:
            _remove(group)


def by_kernel() -> bool:
    """Whether it is the kernel that kills."""
    group = _group(f"phalanx-soak-try-{os.getpid()}")
    if group is not None:
        _remove(group)
    return group is not None


def _group(name: str) -> Path | None:
    """A control group for what a process takes from now on: what it has stays with the group that it was in."""
    for root, file in ((_V1, "memory.limit_in_bytes"), (_V2, "memory.max")):
        with contextlib.suppress(OSError):
            group = root / name
            group.mkdir()
            try:
                (group / file).write_text(str(_MORE))
                return group
            except OSError:
                group.rmdir()
    return None


def _remove(group: Path) -> None:
    """Whoever is still in it goes back."""
    with contextlib.suppress(OSError):
        for pid in (group / "cgroup.procs").read_text().split():
            (group.parent / "cgroup.procs").write_text(pid)
        group.rmdir()


def _resident(pid: int) -> int:
    """Bytes that a process has in memory, 0 once it is gone."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0
