"""What becomes of ranks whose supervisor is gone: those that train finish their step, save and end; others end at once.

The fork server calls this, which outlives the supervisor. To the ranks it is a signal like any other that asks a run to
stop: all agree on the step, and rank 0 says how to go on. However long that takes them, it is bounded.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Iterable
from pathlib import Path

from phalanx.launch.status_board import StatusBoard

STORE = -1  # in the place of a rank: the process that holds the store
_TRAINING = ("compile", "step", "evaluate", "save", "generate", "recover")
_LONGEST_SECONDS = 600.0  # for a step and a checkpoint
_FOLLOW_SECONDS = 30.0  # for ranks to follow the first that ended: they save together
_LOOK_SECONDS = 0.02
_SAID = b"\nthe process that started this run is gone: its ranks finish their step, save and end\n"


def let_go(children: dict[int, int], folder: Path, saves: bool = True) -> int:
    """Returns when no child is left: the exit code. children: process → rank. folder: of the pool, which is cleared
    away. saves: not where ranks of other nodes go on without these."""
    ranks = {pid: rank for pid, rank in children.items() if rank != STORE}
    _reap(ranks)
    trained = saves and bool(ranks) and _train(ranks.values(), folder)
    if trained:
        os.write(2, _SAID)
        for pid in ranks:
            os.kill(pid, signal.SIGTERM)
        _wait(ranks)
    end_all([*ranks, *(pid for pid, rank in children.items() if rank == STORE)])
    shutil.rmtree(folder, ignore_errors=True)
    return int(trained)


def end_all(children: Iterable[int]) -> None:
    for pid in children:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _train(ranks: Iterable[int], folder: Path) -> bool:
    """Whether all of them have something to save, or know that they are not to."""
    try:
        board = StatusBoard.open(folder / "board")
    except OSError:
        return False
    return all(board.slots[rank].read().phase in _TRAINING for rank in ranks)


def _wait(ranks: dict[int, int]) -> None:
    """Until all have ended, or time is over; those that have are taken out."""
    now, num_ranks = time.monotonic(), len(ranks)
    deadline = now + _LONGEST_SECONDS
    while ranks and time.monotonic() < deadline:
        time.sleep(_LOOK_SECONDS)
        _reap(ranks)
        if len(ranks) < num_ranks:
            deadline, num_ranks = min(deadline, time.monotonic() + _FOLLOW_SECONDS), 0


def _reap(ranks: dict[int, int]) -> None:
    for pid in tuple(ranks):
        if os.waitpid(pid, os.WNOHANG)[0]:
            del ranks[pid]
