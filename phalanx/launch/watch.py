"""Watching one job: who is done, who left, who is in trouble, and when it is over.

The first trouble ends the job: everyone is told, gets a moment to say what happened there, and the verdict is drawn.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from phalanx.errors import RankError
from phalanx.launch.board import Board, SilenceWatch
from phalanx.launch.processes import Processes
from phalanx.launch.rank_main import Done, Event, Failed, Left
from phalanx.launch.verdict import Trouble, died, stalled, verdict

_LAST_WORDS_SECONDS = 2.0  # for ranks to end by themselves when another one failed
_FOLLOW_SECONDS = 10.0  # for ranks to follow one that left because of a signal; saving does not count


class Watch:
    """Over the first `world` ranks."""

    def __init__(self, processes: Processes, board: Board, world: int) -> None:
        self._processes, self._board, self._world = processes, board, world
        self._silence = [SilenceWatch() for _ in range(world)]
        self._done: set[int] = set()
        self._left: dict[int, Left] = {}
        self._troubles: dict[int, Trouble] = {}
        self._deadline: float | None = None
        self._sights = {}

    def hear(self, rank: int, on_event: Callable[[str, Any], None] | None) -> bool:
        """Take what a rank says; whether it has hung up."""
        wire = self._processes.alive[rank].wire
        for message in wire.take():
            if isinstance(message, Event):
                if on_event is not None:
                    on_event(message.name, message.payload)
            elif isinstance(message, Done):
                self._done.add(rank)
            elif isinstance(message, Left):
                self._left[rank] = message
            elif isinstance(message, Failed):
                self._add(Trouble(rank, self._sight(rank), failed=message, output=self._output(rank)))
        return wire.closed

    def look(self) -> None:
        """Find those who can no longer say anything."""
        self._processes.note_ended()
        if self._processes.broken:
            raise RankError("the process that starts ranks was ended, and the ranks with it")
        for rank in self._expected():
            process, sight = self._processes.alive[rank], self._sight(rank)
            if process.code is not None:
                self._add(died(rank, sight, process.code, self._output(rank)))
            elif (seconds := self._silence[rank].silent_for(sight, stopped=process.stopped)) is not None:
                self._add(stalled(rank, sight, seconds, self._output(rank)))

    def over(self) -> bool:
        """Whether nothing more is to be expected."""
        expected = self._expected()
        if self._left and not self._troubles and any(self._sight(rank).phase == "save" for rank in expected):
            self._deadline = None
        elif self._left and self._deadline is None:
            self._deadline = time.monotonic() + _FOLLOW_SECONDS
        return not expected or (self._deadline is not None and time.monotonic() > self._deadline)

    def conclude(self) -> None:
        """Raise what the job ended with, if that is not success."""
        if self._troubles:
            raise verdict(list(self._troubles.values()), self._sights)
        if self._left:
            code = self._left[min(self._left)].code
            raise KeyboardInterrupt if code is None else SystemExit(code)

    def _add(self, trouble: Trouble) -> None:
        if not self._troubles:
            # Where the others were when it happened; what they show later is how they ended.
            self._sights = {rank: self._sight(rank) for rank in range(self._world)}
            self._deadline = time.monotonic() + _LAST_WORDS_SECONDS
            self._board.abort()
        self._troubles[trouble.rank] = trouble

    def _expected(self) -> list[int]:
        ended = self._done | self._left.keys() | self._troubles.keys()
        return [rank for rank in range(self._world) if rank not in ended]

    def _sight(self, rank: int) -> Any:
        return self._board.slots[rank].read()

    def _output(self, rank: int) -> list[str]:
        return self._processes.alive[rank].last_output()
