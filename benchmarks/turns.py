"""Two runs that take turns on the same cores, a few steps each, so that a machine that becomes slower does so for both.

Ranks of the run whose turn it is not wait between two steps. What a run does besides its steps, as watching over its
ranks, goes on in the turns of the other.
"""

from __future__ import annotations

import mmap
import struct
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from phalanx.launch.context import RankContext
from phalanx.launch.worker_pool import WorkerPool
from phalanx.training.job import Job, JobPayload, pack, unpack
from phalanx.training.loop import Loop

Pair = tuple[float, float]
_NEVER = 2**31  # the number of the turn for which a run waits that is over
_LOOK = 0.002  # seconds between two looks at where the other run is


class Turns(NamedTuple):
    """path: of a file in which every rank of both runs has a number: how many of its turns are over. first: step after
    which the first turn begins; steps: of a turn."""

    path: str
    world: int
    first: int
    steps: int

    def number_after(self, step: int) -> int | None:
        """Of the turn that begins after this step."""
        number, rest = divmod(step - self.first, self.steps)
        return number if rest == 0 and number >= 0 else None


class _Place:
    """A rank's place in the turns. side: 0 for the run that begins."""

    def __init__(self, turns: Turns, side: int, rank: int) -> None:
        self._turns, self._side, self._index = turns, side, side * turns.world + rank
        with Path(turns.path).open("r+b") as file:
            self._over = mmap.mmap(file.fileno(), 0)

    def wait(self, number: int) -> None:
        """Until this turn begins: those before it are over for all ranks of both runs, and with the second run also the
        other's turn of the same number."""
        self.leave(number)
        while min(self._read(1 - self._side)) < number + self._side or min(self._read(self._side)) < number:
            time.sleep(_LOOK)

    def leave(self, number: int) -> None:
        struct.pack_into("q", self._over, 8 * self._index, number)

    def _read(self, side: int) -> tuple[int, ...]:
        return struct.unpack_from(f"{self._turns.world}q", self._over, 8 * self._turns.world * side)


def fit_in_turns(context: RankContext, payload: JobPayload, turns: Turns, side: int) -> list[float]:
    """A rank's part of one of the runs: seconds of a step, of each of its turns."""
    place, found, began = _Place(turns, side, context.rank), list[float](), 0.0

    def emit(hook: str, *arguments: Any) -> None:
        nonlocal began
        if hook != "on_step" or (number := turns.number_after(arguments[0]["step"])) is None:
            return
        if number:
            found.append((time.perf_counter() - began) / turns.steps)
        place.wait(number)
        began = time.perf_counter()

    try:
        Loop(unpack(payload), context, emit).fit()
    finally:
        place.leave(_NEVER)
    return found


def run_in_turns(pools: Sequence[WorkerPool], jobs: Sequence[Job], *, first: int, steps: int) -> list[Pair]:
    """Seconds of a step of either of two jobs, of each pair of turns. first, steps: as of `Turns`."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(len(jobs)) as threads:
        turns = Turns(str(Path(folder) / "turns"), pools[0].size, first, steps)
        Path(turns.path).write_bytes(struct.pack("q", -1) * 2 * turns.world)

        def run(side: int) -> list[float]:
            with pack(jobs[side]) as payload:
                on_loss = jobs[side].config.on_loss
                return pools[side].run(fit_in_turns, payload, turns, side, on_loss=on_loss)[0]

        one, other = threads.map(run, range(len(jobs)))
    return list(zip(one, other, strict=True))
