"""Processes that come to a job that runs: started beside it, ready once they have prepared themselves.

They are taken in with the next generation. A process that was lost soon after it came is waited with before it is
started again, each time twice as long.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from phalanx.launch.membership import Generation
from phalanx.launch.processes import Processes
from phalanx.launch.status_board import StatusBoard

_SOON_SECONDS = 60.0  # a loss that follows the one before so soon is one of several
_FIRST_WAIT, _LONGEST_WAIT = 1.0, 300.0


class Newcomers:
    """start: hands the job to a process that was just started."""

    def __init__(self, processes: Processes, board: StatusBoard, start: Callable[[int, Generation], None]) -> None:
        self._processes, self._board, self._start = processes, board, start
        self._due: dict[int, float] = {}
        self._lost: dict[int, tuple[float, float]] = {}  # when a process was lost, and how long was waited then
        self._coming: dict[int, int] = {}  # with the generation in which they were started

    def expect(self, lost: Iterable[int]) -> None:
        """These are started again, at once or later."""
        now = time.monotonic()
        for process in lost:
            before, waited = self._lost.get(process, (-_SOON_SECONDS, 0.0))
            wait = min(_LONGEST_WAIT, max(_FIRST_WAIT, 2 * waited)) if now - before < _SOON_SECONDS + waited else 0.0
            self._lost[process], self._due[process] = (now, wait), now + wait

    def fill(self, wanted: int, now: Generation) -> None:
        """Until there are so many ranks."""
        known = {*now.members, *self._coming, *self._due}
        free = [process for process in range(len(self._board.slots)) if process not in known]
        self.expect(free[: max(0, wanted - len(known))])

    def start_due(self, now: Generation) -> list[int]:
        """Those that were started. now: what the job is like."""
        for process in [each for each in self._coming if self._processes.alive[each].gone]:
            self.give_up(process)
        now_due = [process for process, when in self._due.items() if when <= time.monotonic()]
        due = [process for process in now_due if self._processes.can_start(process)]  # others when their node is back
        for process in due:
            del self._due[process]
            self._board.slots[process].clear()
            if process not in self._processes.alive:  # else one that an earlier job left idle
                self._processes.start_one(process)
            self._coming[process] = now.number
            self._start(process, now)
        return due

    def is_coming(self, process: int) -> bool:
        return process in self._coming

    def give_up(self, process: int) -> None:
        """One that ended, or failed, before it was taken in."""
        del self._coming[process]
        self._processes.bury(process)
        self.expect([process])

    def ready(self) -> list[int]:
        return [process for process, since in self._coming.items() if self._board.slots[process].awaited > since]

    def take_ready(self) -> list[int]:
        """Those that are ranks from now on."""
        ready = [process for process in self.ready() if not self._processes.alive[process].gone]
        for process in ready:
            del self._coming[process]
        return ready

    def dismiss(self) -> None:
        """The job is over."""
        for process in self._coming:
            self._processes.bury(process)
        self._coming.clear()
        self._due.clear()
