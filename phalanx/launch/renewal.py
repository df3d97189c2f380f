"""What a supervisor does when ranks of a job are lost and the others are to go on: the next generation.

Whoever is suspected is ended first, so that nobody takes part in two generations. Then its place is filled by a process
of the fork server, or the ranks that are left are numbered anew; and the generation is published. Where a job is to
grow back, processes are started beside it, prepare themselves, and are taken in between two steps (`newcomers.py`).
Ranks that were lost again and again without a step between are not replaced for ever.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

from phalanx.launch.membership import Generation
from phalanx.launch.newcomers import Newcomers
from phalanx.launch.processes import Processes
from phalanx.launch.rank_main import Job
from phalanx.launch.status_board import StatusBoard

OnLoss = Literal["stop", "shrink", "replace", "regrow"]
_MOST_IN_A_ROW = 3  # losses without a finished step between them


class Renewal:
    """Of one job. `generation` is the newest. start: hands a job to a process that was just started, as one of a
    generation. least: with fewer ranks than these a job does not go on, but has others in the places of lost ones."""

    def __init__(
        self, processes: Processes, board: StatusBoard, job: Job, store: Any, on_loss: OnLoss,
        start: Callable[[int, Generation], None], least: int = 1,
    ) -> None:  # fmt: skip
        self._processes, self._board, self._job, self._store, self._least = processes, board, job, store, least
        self.on_loss, self._start, self.generation = on_loss, start, job.members
        self.newcomers = Newcomers(processes, board, self._ahead)
        self._finished, self._in_a_row = dict[int, int](), 0  # steps by process, when ranks were lost the last time
        board.let_grow(True)

    def renew(self, lost: Sequence[int], words: Sequence[str]) -> str | None:
        """Publishes a generation without these processes, or with others in their places; or why there is none. words:
        what happened. Whoever came to the job and is ready is in it."""
        noticed = time.time()
        lost = sorted({*lost, *self._gone(), *self.unready()})
        if (reason := self._why_not(lost)) is not None:
            return reason
        before = self.generation
        for process in lost:
            self._processes.bury(process)
            self._board.slots[process].clear()
        stays = tuple(process for process in before.members if process not in lost)
        came = self.newcomers.take_ready()
        replaces = self.on_loss == "replace" or len(stays) + len(came) < self._least
        base = tuple(p for p in before.members if p in stays or self._processes.can_start(p)) if replaces else stays
        members = (*base, *(process for process in came if process not in base))  # ranks that stay keep their numbers
        if self.on_loss in ("regrow", "replace"):
            self.newcomers.expect([process for process in lost if process not in members])
        new = [process for process in members if process not in stays]
        fresh = tuple(members.index(process) for process in new)
        said = (*words, *(f"a process came to be rank {members.index(process)}" for process in came))
        self.generation = Generation(before.number + 1, members, fresh, said, noticed)
        self._store.set(self.generation.key, self.generation.to_json())
        self._board.invite(False)
        self._board.publish(self.generation.number)
        for process in new:
            if process not in came:
                self._processes.start_one(process)
                self._start(process, self.generation)
        return None

    def tend(self) -> list[int]:
        """Starts processes that are expected, and asks ranks to meet those that are ready; those that were started."""
        if self._board.wanted > len(self.generation.members):
            self.newcomers.fill(self._board.wanted, self.generation)
        else:
            self._board.want(0)
        started = self.newcomers.start_due(self.generation)
        self._board.invite(bool(self.newcomers.ready()))
        return started

    def all_wait(self) -> bool:
        """Whether every rank has come to meet newcomers."""
        slots = (self._board.slots[process] for process in self.generation.members)
        return self._board.invited and all(slot.awaited > self.generation.number for slot in slots)

    def _ahead(self, process: int, now: Generation) -> None:
        members = (*now.members, process)
        self._start(process, Generation(now.number, members, (len(members) - 1,), is_ahead=True))

    def _gone(self) -> list[int]:
        return [process for process in self.generation.members if self._processes.alive[process].gone]

    def unready(self) -> list[int]:
        """Those that were started for this generation and hold nothing yet: they are started again for the next."""
        fresh = [self.generation.members[rank] for rank in self.generation.fresh]
        return [process for process in fresh if not self._board.slots[process].guarded]

    def _why_not(self, lost: Sequence[int]) -> str | None:
        survivors = [process for process in self.generation.members if process not in lost]
        if not survivors:
            return "no rank is left that could go on"
        if not all(self._board.slots[process].guarded for process in survivors):
            return "the ranks were not training yet, or not any more"
        places = [process for process in lost if self._processes.can_start(process)]
        if len(survivors) + len(places) + len(self.newcomers.ready()) < self._least:
            return f"{len(survivors)} ranks are left, min_ranks = {self._least}, and no machine has room for others"
        if not lost and self._board.invited:
            return None
        finished = {process: self._board.slots[process].finished for process in survivors}
        has_trained = any(number > self._finished.get(process, 0) for process, number in finished.items())
        self._in_a_row, self._finished = 1 if has_trained else self._in_a_row + 1, finished
        if self._in_a_row > _MOST_IN_A_ROW:
            return f"it was the {self._in_a_row}th loss in a row without a finished step"
        return None
