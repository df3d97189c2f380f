"""Signals that hit a rank at a chosen moment: it is held still first, so that what it was doing is certain."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

from phalanx.launch.status_board import StatusBoard, StatusView
from phalanx.state import folders

Wanted = Callable[[StatusView], bool]


def at(instruction: str, *, after: int = 4) -> Wanted:
    """While the rank is at an instruction that begins like this, in a step after the given one."""
    return lambda view: view.phase == "step" and view.step > after and view.instruction.startswith(instruction)


def saving(out: Path, rank: int, *, after: int = 4) -> Wanted:
    """While a checkpoint is being written and the rank has not told the others that its part is done."""

    def wanted(view: StatusView) -> bool:
        if view.step <= after:
            return False
        return any(
            not (partial / folders.MARKER).exists() and not (partial / f"index-{rank:05}.json").exists()
            for partial in (out / "checkpoints").glob(".step-*.writing")
        )

    return wanted


def is_alive(pid: int) -> bool:
    """Whether the process runs; one that has ended and was not yet waited for does not."""
    return state(pid) not in ("", "Z", "X")


def state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def strike(board: StatusBoard, rank: int, pid: int, wanted: Wanted, number: int, seconds: float = 60.0) -> StatusView:
    """Sends the signal at the wanted moment; what the rank was doing."""
    slot, deadline = board.slots[rank], time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not wanted(slot.read()):
            time.sleep(2e-5)
            continue
        os.kill(pid, signal.SIGSTOP)
        while state(pid) not in ("T", ""):
            pass
        if wanted(view := slot.read()):
            os.kill(pid, number)
            return view
        os.kill(pid, signal.SIGCONT)
    raise AssertionError(f"rank {rank} was never seen where it should be hit; last {slot.read()}")


class Striker(threading.Thread):
    """Strikes beside a job that keeps this thread busy. `view`, `at` and `pids` say what was hit and when."""

    def __init__(
        self, begin: Callable[[], tuple[StatusBoard, dict[int, int]] | None], rank: int, wanted: Wanted, number: int
    ):
        super().__init__(daemon=True)
        self._begin, self._rank, self._wanted, self._number = begin, rank, wanted, number
        self.view: StatusView | None = None
        self.at, self.pids = 0.0, {}
        self.start()

    def run(self) -> None:
        while (found := self._begin()) is None:
            time.sleep(0.01)
        board, self.pids = found
        self.view = strike(board, self._rank, self.pids[self._rank], self._wanted, self._number)
        self.at = time.monotonic()
