"""Processes that come to a job that runs: started beside it, ready once they have prepared themselves.

They are taken in with the next generation. A process that ended or fell silent before it held anything, or was lost
soon after it came, is waited with before it is started again, each time twice as long.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable

from phalanx.launch.membership import Generation
from phalanx.launch.processes import Processes
from phalanx.launch.status_board import RunningClock, SilenceWatch, StatusBoard

_SOON_SECONDS = 60.0  # a process that is lost so soon after it came will be lost again
_FIRST_WAIT, _LONGEST_WAIT = 1.0, 300.0


class Newcomers:
    """start: hands the job to a process that was just started. silence: seconds without a sign of life."""

    def __init__(
        self, processes: Processes, board: StatusBoard, start: Callable[[int, Generation], None], silence: float
    ) -> None:
        self._processes, self._board, self._start, self._silence = processes, board, start, silence
        self._clock, self._watched = RunningClock(), dict[int, SilenceWatch]()
        self._due: dict[int, float] = {}
        self._waited: dict[int, float] = {}  # how long, before processes were started again
        self._came: dict[int, float] = {}  # since when those of them hold something
        self._coming: dict[int, int] = {}  # with the generation in which they were started
        self._said: set[tuple[int, str]] = set()

    def expect(self, lost: Iterable[int]) -> None:
        """These are started again, at once or later."""
        now = time.monotonic()
        for process in lost:
            came = self._came.pop(process, None)
            is_soon = process in self._waited and (came is None or now - came < _SOON_SECONDS)
            wait = min(_LONGEST_WAIT, max(_FIRST_WAIT, 2 * self._waited[process])) if is_soon else 0.0
            self._waited[process], self._due[process] = wait, now + wait

    def expect_at_once(self, ended: Iterable[int]) -> None:
        """These too: they were ended for what happened to others."""
        self._due.update(dict.fromkeys(ended, time.monotonic()))

    def due(self) -> list[int]:
        """For which it is time, and that have a place; others wait until their node is back."""
        now = time.monotonic()
        return [process for process, when in self._due.items() if when <= now and self._processes.can_start(process)]

    def leave(self, processes: Iterable[int]) -> None:
        """These are started by others."""
        for process in processes:
            del self._due[process]

    def note(self, members: Iterable[int]) -> None:
        """Those that came and hold something by now."""
        for process in members:
            if process in self._waited and process not in self._came and self._board.slots[process].guarded:
                self._came[process] = time.monotonic()

    def fill(self, wanted: int, now: Generation) -> None:
        """Until there are so many ranks."""
        known = {*now.members, *self._coming, *self._due}
        free = [process for process in range(len(self._board.slots)) if process not in known]
        self.expect(free[: max(0, wanted - len(known))])

    def start_due(self, now: Generation) -> list[int]:
        """Those that were started. now: what the job is like."""
        for process, how in [(each, how) for each in self._coming if (how := self._how_lost(each))]:
            self.give_up(process, how)
        due = self.due()
        self.leave(due)
        for process in due:
            self._board.slots[process].clear()
            if process not in self._processes.alive:  # else one that an earlier job left idle
                self._processes.start_one(process)
            self._coming[process] = now.number
            self._watched[process] = SilenceWatch(self._clock, self._silence)
            self._start(process, now)
        return due

    def _how_lost(self, process: int) -> str | None:
        """In words; None of one that lives."""
        if self._processes.alive[process].gone:
            return self._processes.alive[process].how_ended
        if not self._processes.hears_of(process):
            return None
        seconds = self._watched[process].silent_for(self._board.slots[process].read(with_recent=False))
        return None if seconds is None else f"stopped answering for {seconds:.0f} s"

    def is_coming(self, process: int) -> bool:
        return process in self._coming

    def give_up(self, process: int, how: str) -> None:
        """One that ended, or failed, before it was taken in. how: in words, which are said once."""
        del self._coming[process]
        self._processes.bury(process)
        self.expect([process])
        if (process, how) not in self._said:
            self._said.add((process, how))
            print(f"a process that was to take part {how}; it is started again later", file=sys.stderr, flush=True)

    def ready(self) -> list[int]:
        waiting = [process for process, since in self._coming.items() if self._board.slots[process].awaited > since]
        return [process for process in waiting if not self._processes.alive[process].gone]

    def take_ready(self) -> list[int]:
        """Those that are ranks from now on."""
        ready = self.ready()
        for process in ready:
            del self._coming[process]
        return ready

    def dismiss(self) -> None:
        """The job is over."""
        for process in self._coming:
            self._processes.bury(process)
        self._coming.clear()
        self._due.clear()
