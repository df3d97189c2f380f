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
        training = _training(self._alive(), folder) if saves else []
        if training:
            os.write(2, _SAID)
            self._ask_to_stop(training)
            self._wait(training)
        self.end_all()
        shutil.rmtree(folder, ignore_errors=True)
        return int(bool(training))

    def _alive(self) -> list[int]:
        """Ranks of which the processes live."""
        list(self.take_ended())
        adopted = [rank for rank, handle in self._adopted.items() if not handle.gone]
        return [rank for rank in (*self._children.values(), *adopted) if rank != STORE]

    def _ask_to_stop(self, ranks: Collection[int]) -> None:
        for pid, rank in self._children.items():
            if rank in ranks:
                os.kill(pid, signal.SIGTERM)
        for rank, handle in self._adopted.items():
            if rank in ranks:
                handle.send(signal.SIGTERM)

    def _wait(self, ranks: Collection[int]) -> None:
        """Until all of them have ended, or time is over."""
        deadline, num_ranks = time.monotonic() + _LONGEST_SECONDS, len(ranks)
        while (left := len({*ranks} & {*self._alive()})) and time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS)
            if left < num_ranks:
                deadline, num_ranks = min(deadline, time.monotonic() + _FOLLOW_SECONDS), 0


def _training(ranks: Collection[int], folder: Path) -> list[int]:
    """Those that take part in a job, if all of these have something to save, or know that they are not to. Of a job
    that survives losses they have said so; processes that come to it, or replace some, hear it from these. Others of a
    pool may have nothing to do."""
    try:
        board = StatusBoard.open(folder / "board")
    except OSError:
        return []
    views = {rank: board.slots[rank].read() for rank in ranks}
    parts = [rank for rank in ranks if board.slots[rank].guarded]
    parts = parts or [rank for rank, view in views.items() if view.phase != "start" or view.step >= 0]
    return parts if all(views[rank].phase in _TRAINING for rank in parts) else []
