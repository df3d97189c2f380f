"""Whether the kernel ended processes for lack of memory, and what is said of one that was killed."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path


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


def who_kills(before: Mapping[str, int], now: Mapping[str, int]) -> str:
    """What the kernel's counters say of a process that was killed."""
    less = "give the ranks more memory, or them less to keep: more micro-batches (mb), recompute=yes, zero=1"
    if now.get("control group", 0) > before.get("control group", 0):
        return f"memory ran out: the kernel counts a kill for it in this job's control group; {less}"
    if now.get("machine", 0) > before.get("machine", 0):
        return f"memory may have run out: the kernel ended a process of this machine for it (dmesg says which); {less}"
    if now:
        return "not for lack of memory, by the kernel's count of such kills: a person, a scheduler or a program sent it"
    return "the kernel does not say here whether memory ran out (dmesg may); a person or a scheduler may have sent it"
