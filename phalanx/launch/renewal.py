"""What a supervisor does when ranks of a job are lost and the others are to go on: the next generation.

Whoever is suspected is ended first, so that nobody takes part in two generations. Then its place is filled by a process
of the fork server, or the ranks that are left are numbered anew; and the generation is published. Ranks that were lost
again and again without a step between are not replaced for ever.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

from phalanx.launch.membership import Generation
from phalanx.launch.processes import Processes
from phalanx.launch.rank_main import Job
from phalanx.launch.status_board import StatusBoard

OnLoss = Literal["stop", "shrink", "replace"]
_MOST_IN_A_ROW = 3  # losses without a finished step between them


class Renewal:
    """Of one job. `generation` is the newest. start: hands a job to a process that was just started."""

    def __init__(
        self, processes: Processes, board: StatusBoard, job: Job, store: Any, on_loss: OnLoss,
        start: Callable[[int, Job], None],
    ) -> None:  # fmt: skip
        self._processes, self._board, self._job, self._store = processes, board, job, store
        self.on_loss, self._start, self.generation = on_loss, start, job.members
        self._step, self._in_a_row = -1, 0

    def renew(self, lost: Sequence[int], words: Sequence[str]) -> str | None:
        """Publishes a generation without these processes, or with others in their places; or why there is none. words:
        what happened."""
        noticed = time.time()
        lost = sorted({*lost, *self._gone(), *self._unready()})
        if (reason := self._why_not(lost)) is not None:
            return reason
        before = self.generation
        for process in lost:
            self._processes.bury(process)
            self._board.slots[process].clear()
        stays = tuple(process for process in before.members if process not in lost)
        members = before.members if self.on_loss == "replace" else stays
        fresh = tuple(rank for rank, process in enumerate(members) if process in lost)
        self.generation = Generation(before.number + 1, members, fresh, tuple(words), noticed)
        self._store.set(self.generation.key, self.generation.to_json())
        self._board.publish(self.generation.number)
        for rank in fresh:
            self._processes.start_one(members[rank])
            self._start(members[rank], self._job)
        return None

    def _gone(self) -> list[int]:
        return [process for process in self.generation.members if self._processes.alive[process].gone]

    def _unready(self) -> list[int]:
        """Those that were started for this generation and hold nothing yet: they are started again for the next."""
        fresh = [self.generation.members[rank] for rank in self.generation.fresh]
        return [process for process in fresh if not self._board.slots[process].guarded]

    def _why_not(self, lost: Sequence[int]) -> str | None:
        survivors = [process for process in self.generation.members if process not in lost]
        if not survivors:
            return "no rank is left that could go on"
        if not all(self._board.slots[process].guarded for process in survivors):
            return "the ranks were not training yet, or not any more"
        step = max(self._board.slots[process].read().step for process in self.generation.members)
        self._in_a_row = self._in_a_row + 1 if step == self._step else 1
        self._step = step
        if self._in_a_row > _MOST_IN_A_ROW:
            return f"it was the {self._in_a_row}th loss in a row without a finished step"
        return None
