"""Generations of a job: which processes are its ranks, and from when on.

A job begins as generation 0. When a rank is lost, the supervisor publishes the next: it says who the ranks are now, and
which of them were just started. A rank whose links broke waits for it and goes on in place, under the number that it
has there. What a rank does with its state is not decided here.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from typing import Any

from phalanx.launch.abort import AbortEvent
from phalanx.launch.status_board import StatusBoard, StatusSlot
from phalanx.records import read_record

_LOOK_SECONDS = 0.002


@dataclass(frozen=True)
class Generation:
    """members: the process that is each rank. fresh: the ranks that were just started and hold nothing. lost: what
    happened, in words. noticed: when, as `time.time` counts."""

    number: int
    members: tuple[int, ...]
    fresh: tuple[int, ...] = ()
    lost: tuple[str, ...] = ()
    noticed: float = 0.0

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @property
    def key(self) -> str:
        """Under which it lies in the job's store."""
        return f"generation/{self.number}"


class Membership:
    """One process's part in a job's generations. `abort` is the event of the one that it is in; the heartbeat calls
    `look`."""

    def __init__(self, board: StatusBoard, slot: StatusSlot, process: int, generation: Generation) -> None:
        self._board, self._slot, self.process, self.generation = board, slot, process, generation
        self.abort = AbortEvent()

    @property
    def is_fresh(self) -> bool:
        """Whether this process was started in the place of one that was lost."""
        return self.rank in self.generation.fresh

    @property
    def rank(self) -> int:
        return self.generation.members.index(self.process)

    def look(self) -> None:
        if self._board.aborted:
            self.abort.set("another rank failed")
        elif self._board.generation > self.generation.number:
            self.abort.set("a rank was lost")

    def follow(self, store: Any, seconds: float) -> bool:
        """Waits for the next generation and enters it; False when the job is over, or none came in so many seconds."""
        self._slot.await_generation(self.generation.number + 1)
        deadline = time.monotonic() + seconds
        while self._board.generation <= self.generation.number:
            if self._board.aborted or time.monotonic() > deadline:
                return False
            time.sleep(_LOOK_SECONDS)
        if self._board.aborted:
            return False
        found = store.get(Generation(self._board.generation, ()).key)
        self.abort, self.generation = AbortEvent(), read_record(Generation, found)
        self._slot.await_generation(0)
        return True
