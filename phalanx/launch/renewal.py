"""What a supervisor does when ranks of a job are lost and the others are to go on: the next generation.

Whoever is suspected is ended first, so that nobody takes part in two generations. Then its place is filled by a process
of the fork server, or the ranks that are left are numbered anew; and the generation is published, in a new store where
the process that held it is gone. Where a job is to grow back, processes are started beside it, prepare themselves, and
are taken in between two steps (`newcomers.py`); so are those that were to take a place and did not come to hold
anything, or were lost again soon. Where too few ranks are left, they keep what they have and wait.
Ranks that were lost again and again without a step between are not replaced for ever.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

from phalanx.errors import StoreError
from phalanx.launch.membership import Generation
from phalanx.launch.newcomers import Newcomers
from phalanx.launch.processes import Processes
from phalanx.launch.rank_main import Job
from phalanx.launch.status_board import StatusBoard
from phalanx.launch.store import JobStore, connect_store

OnLoss = Literal["stop", "shrink", "replace", "regrow"]
_MOST_IN_A_ROW = 3  # losses without a finished step between them
_STORE_SECONDS = 1.0  # for the process of a store that does not answer to be gone
_LOST_STORE = "the process that held the store of the ranks ended; they met at another"


class Renewal:
    """Of one job. `generation` is the newest, `store` where its ranks meet. start: hands a job to a process that was
    just started, as one of a generation. least: with fewer ranks than these a job does not go on, but has others in the
    places of lost ones, or waits for them."""

    def __init__(
        self, processes: Processes, board: StatusBoard, job: Job, store: JobStore, on_loss: OnLoss,
        start: Callable[[int, Generation], None], least: int = 1,
    ) -> None:  # fmt: skip
        self._processes, self._board, self._job, self.store, self._least = processes, board, job, store, least
        self.on_loss, self._start, self.generation = on_loss, start, job.members
        self.newcomers = Newcomers(processes, board, self._ahead, job.silence)
        self._finished, self._in_a_row = dict[int, int](), 0  # steps by process, when ranks were lost the last time
        self._ends = False
        board.let_grow(True)

    def renew(self, lost: Sequence[int], words: Sequence[str]) -> str | None:
        """Publishes a generation without these processes, or with others in their places; or why there is none. words:
        what happened. Whoever came to the job and is ready is in it."""
        before, noticed = self.generation, time.time()
        failed, unready = {*lost, *self._gone()}, self.unready()
        lost = sorted({*failed, *unready})
        if (reason := self._why_not(lost, is_start=bool(failed) and failed <= set(unready))) is not None:
            return reason
        if before.lost and not self._is_told():
            words, noticed = (*before.lost, *words), before.noticed
        for process in lost:
            self._processes.bury(process)
            self._board.slots[process].clear()
        stays = tuple(process for process in before.members if process not in lost)
        at_once = self._in_places(failed, [process for process in unready if process not in failed], stays)
        waits = len(stays) + len(self.newcomers.ready()) + len(at_once) < self._least
        came, at_once = ([], []) if waits else (self.newcomers.take_ready(), at_once)
        self.newcomers.leave(at_once)
        base = tuple(process for process in before.members if process in stays or process in at_once)
        members = (*base, *came)  # ranks that stay keep their numbers
        new = [process for process in members if process not in stays]
        fresh = tuple(members.index(process) for process in new)
        said = (*words, *(f"a process came to be rank {members.index(process)}" for process in came))
        self.generation = Generation(before.number + 1, members, fresh, said, noticed, waits=waits)
        self._publish()
        for process in new:
            if process not in came:
                self._processes.start_one(process)
                self._start(process, self.generation)
        return None

    def _publish(self) -> None:
        try:
            self._put()
        except StoreError:
            if not self._processes.store_ends_within(_STORE_SECONDS):
                raise
            self._put()
        self._board.invite(False)
        self._board.publish(self.generation.number)

    def _put(self) -> None:
        """Says who the ranks are in the store, another one where it is lost."""
        if self._processes.lost_store:
            self.generation = replace(self.generation, lost=(*self.generation.lost, _LOST_STORE))
            self.store = self.store.at(connect_store("127.0.0.1", self._processes.host_store()))
            self._board.move_store(*self.store.ticket[:2])
        key = self.generation.key
        self.store.set(key, self.generation.to_json())
        self.store.check([key])  # which waits for an answer

    def tend(self) -> list[int]:
        """Starts processes that are expected, and asks ranks to meet those that are ready; those that were started."""
        now = self.generation
        if self._ends:
            return []
        if self._board.wanted <= len(now.members):
            self._board.want(0)
        self.newcomers.note(now.members)
        if (wanted := max(self._board.wanted, self._least if now.waits else 0)) > len(now.members):
            self.newcomers.fill(wanted, now)
        started = self.newcomers.start_due(now) if self._can_prepare() else []
        num_ready = len(self.newcomers.ready())
        self._board.invite(num_ready > 0 and len(now.members) + num_ready >= self._least)
        return started

    def wind_down(self) -> bool:
        """The job is to end: nobody comes to it any more, and fewer ranks go on, too. Whether those that are left wait
        for others."""
        self._least, self._ends = 1, True
        self.newcomers.dismiss()
        self._board.invite(False)
        return self.generation.waits

    def all_wait(self) -> bool:
        """Whether every rank has come to meet newcomers."""
        slots = (self._board.slots[process] for process in self.generation.members)
        return self._board.invited and all(slot.awaited > self.generation.number for slot in slots)

    def _in_places(self, failed: set[int], ended: Sequence[int], stays: Sequence[int]) -> list[int]:
        """Whoever is to be started at once in the place of a lost process; others that are to come, come later. ended:
        those that were ended for what happened to others."""
        if self.on_loss == "replace" or len(stays) + len(self.newcomers.ready()) < self._least:
            self.newcomers.expect(failed)
            self.newcomers.expect_at_once(ended)
            return [process for process in self.newcomers.due() if process in (*failed, *ended)]
        if self.on_loss == "regrow":
            self.newcomers.expect((*failed, *ended))
        return []

    def _is_told(self) -> bool:
        """Whether the ranks have told of what happened before this generation."""
        first = self._board.slots[self.generation.members[0]]
        return first.entered >= self.generation.number and first.has_told

    def _can_prepare(self) -> bool:
        """Whether the ranks have said what a process that comes to them prepares itself for."""
        return self.generation.number == 0 or self.generation.waits or self._is_told()

    def _ahead(self, process: int, now: Generation) -> None:
        members = (*now.members, process)
        self._start(process, Generation(now.number, members, (len(members) - 1,), is_ahead=True))

    def _gone(self) -> list[int]:
        return [process for process in self.generation.members if self._processes.alive[process].gone]

    def unready(self) -> list[int]:
        """Those that were started for this generation and hold nothing yet: they are started again for the next."""
        fresh = [self.generation.members[rank] for rank in self.generation.fresh]
        return [process for process in fresh if not self._board.slots[process].guarded]

    def _why_not(self, lost: Sequence[int], is_start: bool) -> str | None:
        """is_start: only processes are lost that had not begun to take part; these do not come again at once."""
        survivors = [process for process in self.generation.members if process not in lost]
        if not survivors:
            return "no rank is left that could go on"
        if not all(self._board.slots[process].guarded for process in survivors):
            return "the ranks were not training yet, or not any more"
        if is_start or self.generation.waits or (not lost and self._board.invited):
            return None
        finished = {process: self._board.slots[process].finished for process in survivors}
        has_trained = any(number > self._finished.get(process, 0) for process, number in finished.items())
        self._in_a_row, self._finished = 1 if has_trained else self._in_a_row + 1, finished
        if self._in_a_row > _MOST_IN_A_ROW:
            return f"it was the {self._in_a_row}th loss in a row without a finished step"
        return None
