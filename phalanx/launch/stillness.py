"""Notices that a process stands still, long before its silence tells: it shows no sign of life although nothing keeps
it from running.

A rank's heart beats on a thread that needs next to nothing. On a busy machine it beats late because it waits for a
core, in a long call because another thread runs, on a slow disk because the kernel works for it: the system tells all
of these from a process whose threads are asleep or stopped. A rank that starts, compiles or saves may sleep for long in
one call, and stands still only where a signal stopped it. Where the system tells nothing, only silence counts.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from phalanx.launch.abort import BEAT_SECONDS
from phalanx.launch.status_board import QUICK_PHASES, RunningClock, StatusView

STILL_SECONDS = 0.7
LONGEST_LOOK = 0.3  # seconds that one look counts for at most: whoever looks seldom has seen little
MOST_BUSY = 0.05  # of a core: threads that wait for Python's lock wake up to ask for it
_STOPPED = "T"
_SLEEPS = f"S{_STOPPED}I"  # asleep, stopped by a signal, idle; not: running, waiting for a disk, held by a debugger


@dataclass(frozen=True)
class Activity:
    """seconds: of computing, so far. sleeps: whether no thread wants to run; main_sleeps: whether the main one does
    not. stopped: whether none can, as a signal stopped all of them."""

    seconds: float
    sleeps: bool
    main_sleeps: bool = True
    stopped: bool = False


def activity(pid: int) -> Activity | None:
    """As the system tells it; None where it does not."""
    with suppress(OSError, ValueError, IndexError):
        state, *fields = _fields(Path(f"/proc/{pid}/stat"))
        spent = sum(map(int, fields[10:12])) / os.sysconf("SC_CLK_TCK")
        states = {_fields(thread / "stat")[0] for thread in Path(f"/proc/{pid}/task").iterdir()}
        return Activity(spent, states <= {*_SLEEPS}, state in _SLEEPS, states <= {_STOPPED})
    return None


def activity_with_children(pid: int) -> Activity | None:
    """The same of a process and all that it started: it may wait for them, to load data or to compile."""
    own = activity(pid)
    if own is None:
        return None
    found = list[Activity]()
    with suppress(OSError):
        for file in list(Path(f"/proc/{pid}/task").glob("*/children")):
            children = (activity_with_children(int(child)) for child in file.read_text().split())
            found += [child for child in children if child is not None]
    sleeps, main_sleeps = all(each.sleeps for each in found), all(each.main_sleeps for each in found)
    seconds = own.seconds + sum(each.seconds for each in found)
    return Activity(seconds, own.sleeps and sleeps, own.main_sleeps and main_sleeps)


def _fields(path: Path) -> list[str]:
    """From the state on: what is before it may hold spaces."""
    return path.read_text().rpartition(")")[2].split()


class Stillness:
    """Of one process."""

    def __init__(self, clock: RunningClock, look: Callable[[], Activity | None]) -> None:
        self._clock, self._look = clock, look
        self._beat, self._beat_at, self._since = -1, clock.read(), clock.read()
        self._spent: float | None = None  # what it had computed when it was first asked, since its heart beat last

    def seconds(self, view: StatusView) -> float:
        """For how long it has been still by now. While its heart beats the system is not asked: that takes time, and
        every look at every rank would."""
        now = self._clock.read()
        if view.beat != self._beat:
            self._beat, self._beat_at, self._since, self._spent = view.beat, now, now, None
        if now - self._beat_at <= BEAT_SECONDS:
            return now - self._since
        found = self._look()
        if found is None or not _is_still(found, view) or self._is_busy(found, now):
            self._since, self._spent = now, found.seconds if found else None
        elif self._spent is None:
            self._spent = found.seconds
        return now - self._since

    def _is_busy(self, found: Activity, now: float) -> bool:
        spent = found.seconds - (found.seconds if self._spent is None else self._spent)
        return spent > MOST_BUSY * max(now - self._since, LONGEST_LOOK)


def _is_still(found: Activity, view: StatusView) -> bool:
    return found.stopped or (found.sleeps and view.phase in QUICK_PHASES)
