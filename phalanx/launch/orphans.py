"""The processes that a fork server looks after, and what becomes of them when their supervisor is gone: ranks that
train finish their step, save and end; others end at once.

The fork server outlives the supervisor. To the ranks it is a signal like any other that asks a run to stop: all agree
on the step, and rank 0 says how to go on. However long that takes them, it is bounded.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from phalanx.launch.handles import Handle
from phalanx.launch.status_board import StatusBoard

STORE = -1  # in the place of a rank: the process that holds the store
_TRAINING = ("compile", "step", "evaluate", "save", "generate", "recover")
_LONGEST_SECONDS = 600.0  # for a step and a checkpoint
_FOLLOW_SECONDS = 30.0  # for ranks to follow the first that ended: they save together
_LOOK_SECONDS = 0.02
_END_SECONDS = 10.0  # for a process that was killed
_SAID = b"\nthe process that started this run is gone: its ranks finish their step, save and end\n"


class Wards:
    """Children, and processes that are none because another server had started them. adopted: the second, by rank."""

    def __init__(self, adopted: Mapping[int, Handle] | None = None) -> None:
        self._children = dict[int, int]()  # process → rank
        self._adopted = dict(adopted or {})

    def add(self, child: int, rank: int) -> None:
        self._children[child] = rank

    def take_ended(self) -> Iterator[tuple[int, int]]:
        """Children that have ended, and their exit codes."""
        for pid in tuple(self._children):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                del self._children[pid]
                yield pid, os.waitstatus_to_exitcode(status)

    def end_all(self) -> None:
        for pid in self._children:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        for handle in self._adopted.values():
            handle.send(signal.SIGKILL)
            handle.ends_within(_END_SECONDS)

    def let_go(self, folder: Path, saves: bool = True) -> int:
        """Returns when nobody is left: the exit code. folder: of the pool, which is cleared away. saves: not where
        ranks of other nodes go on without these."""
        ranks = self._ranks()
        trained = saves and bool(ranks) and _train(ranks, folder)
        if trained:
            os.write(2, _SAID)
            self._ask_to_stop()
            self._wait(len(ranks))
        self.end_all()
        shutil.rmtree(folder, ignore_errors=True)
        return int(trained)

    def _ranks(self) -> list[int]:
        """Of which the processes live."""
        list(self.take_ended())
        adopted = [rank for rank, handle in self._adopted.items() if not handle.gone]
        return [rank for rank in (*self._children.values(), *adopted) if rank != STORE]

    def _ask_to_stop(self) -> None:
        for pid, rank in self._children.items():
            if rank != STORE:
                os.kill(pid, signal.SIGTERM)
        for rank, handle in self._adopted.items():
            if rank != STORE:
                handle.send(signal.SIGTERM)

    def _wait(self, num_ranks: int) -> None:
        """Until all have ended, or time is over."""
        deadline = time.monotonic() + _LONGEST_SECONDS
        while (left := len(self._ranks())) and time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS)
            if left < num_ranks:
                deadline, num_ranks = min(deadline, time.monotonic() + _FOLLOW_SECONDS), 0


def _train(ranks: Collection[int], folder: Path) -> bool:
    """Whether all of them have something to save, or know that they are not to."""
    try:
        board = StatusBoard.open(folder / "board")
    except OSError:
        return False
    return all(board.slots[rank].read().phase in _TRAINING for rank in ranks)
