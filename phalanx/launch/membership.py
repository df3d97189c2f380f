"""Generations of a job: which processes are its ranks, and from when on.

A job begins as generation 0. When a rank is lost, the supervisor publishes the next: it says who the ranks are now, and
which of them were just started. A rank whose links broke waits for it and goes on in place, under the number that it
has there. What a rank does with its state is not decided here.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from phalanx.errors import StoreError
from phalanx.launch.abort import AbortEvent
from phalanx.launch.status_board import StatusBoard, StatusSlot
from phalanx.launch.store import JobStore
from phalanx.records import read_record

_LOOK_SECONDS = 0.002


@dataclass(frozen=True)
class Generation:
    """members: the process that is each rank. fresh: the ranks that were just started and hold nothing. lost: what
    happened, in words. noticed: when, as `time.time` counts. is_ahead: it was not published, and is what a process that
    comes to a job that runs is told; it goes on in one that was. waits: there are too few ranks, which keep what they
    have until there are others."""

    number: int
    members: tuple[int, ...]
    fresh: tuple[int, ...] = ()
    lost: tuple[str, ...] = ()
    noticed: float = 0.0
    is_ahead: bool = False
    waits: bool = False

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @property
    def key(self) -> str:
        """Under which it lies in the job's store."""
        return f"generation/{self.number}"


class Membership:
    """One process's part in a job's generations. `abort` is the event of the one that it is in; the heartbeat calls
    `look`. places: of every process, its node and its number there; {} where all are on one machine."""

    def __init__(
        self, board: StatusBoard, slot: StatusSlot, process: int, generation: Generation,
        places: Mapping[int, tuple[int, int]],
    ) -> None:  # fmt: skip
        self._board, self._slot, self.process, self.generation = board, slot, process, generation
        self._nodes = {number: node for number, (node, _) in places.items()}
        self.abort = AbortEvent()
        slot.enter_generation(generation.number)

    @property
    def is_fresh(self) -> bool:
        """Whether this process was started in the place of one that was lost."""
        return self.rank in self.generation.fresh

    @property
    def rank(self) -> int:
        return self.generation.members.index(self.process)

    @property
    def local_world(self) -> int:
        """How many ranks of the generation are on the machine of this one."""
        own = self._nodes.get(self.process)
        return sum(self._nodes.get(process) == own for process in self.generation.members)

    @property
    def is_invited(self) -> bool:
        """Whether others are ready to take part, from the next step on."""
        return self._board.invited

    def gets(self, num_ranks: int) -> bool:
        """Asks for so many ranks; whether they can come."""
        if num_ranks > self._board.room:
            return False
        self._board.want(num_ranks)
        return True

    def look(self) -> None:
        if self._board.aborted:
            self.abort.set("another rank failed")
        elif self._board.generation > self.generation.number and not self.generation.is_ahead:
            self.abort.set("a rank was lost")

    def follow(self, store: JobStore, seconds: float) -> JobStore | None:
        """Waits for the next generation that this process is in, and enters it; the job's store then, over a connection
        of its own: a thread that was given up may wait for ever with the other one. None when the job is over, or none
        came in so many seconds. store: as it was."""
        seen, deadline = self.generation.number, time.monotonic() + seconds
        while not self._board.aborted and time.monotonic() < deadline:
            self._slot.await_generation(seen + 1)
            if self._board.generation <= seen:
                time.sleep(_LOOK_SECONDS)
                continue
            newest = self._board.generation
            try:
                own = store.reached_at(self._board.store)
                key = Generation(newest, ()).key
                if not own.check([key]):
                    time.sleep(_LOOK_SECONDS)  # it was published in a store that is gone; another will be in this one
                    continue
                seen, found = newest, read_record(Generation, own.get(key))
            except StoreError:
                continue  # whoever published it is gone already; another will
            if self.process in found.members:
                self.abort, self.generation = AbortEvent(), found
                self._slot.enter_generation(found.number)
                return own
        return None
