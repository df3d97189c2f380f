"""Runs that lose ranks on the way: real processes, real signals, at moments that are certain."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from phalanx.launch.renewal import OnLoss
from phalanx.launch.status_board import StatusView
from phalanx.launch.worker_pool import WorkerPool
from phalanx.observe.runlog import read_log
from phalanx.state import checkpoint
from phalanx.training.job import Summary, pack
from phalanx.training.trainer import Trainer, fit_on_rank
from tests.faults.strike import Wanted, state
from tests.run_helpers import records, short_config

OPTIONS = {
    "dtype": "float64", "batch_size": 8, "lr": 3e-3, "warmup_steps": 2, "clip": 0.5, "seed": 3, "export": False,
    "device": "cpu", "steps": 6, "seq_len": 8, "timeout": 30.0,
}  # fmt: skip
DATA = "synthetic:13"


def fit(
    pool: WorkerPool, out: Path, world: int, on_loss: OnLoss, *, strikes: Sequence[Strike] = (), on_event: Any = None,
    trainer: Trainer | None = None, target: Callable[..., Any] = fit_on_rank, **options: Any,
) -> Summary:  # fmt: skip
    trainer = trainer or Trainer("gpt2", DATA, short_config(out, **{**OPTIONS, "on_loss": on_loss, **options}))
    ended = threading.Event()
    strikers = threading.Thread(target=lambda: [each.strike(pool, ended) for each in strikes], daemon=True)
    pool._board.reset()  # so that nothing of an earlier run is taken for a moment of this one
    strikers.start()
    try:
        with pack(trainer.job) as payload:
            least = trainer.job.config.min_ranks
            found = pool.run(target, payload, world=world, on_event=on_event, on_loss=on_loss, least=least)[0]
    finally:
        ended.set()
        strikers.join(5.0)
    assert all(each.view is not None for each in strikes), "a rank was never seen where it should be hit"
    return found


class Strike:
    """A signal that hits a process at a moment; it is held still first, so that what it was doing is certain."""

    def __init__(self, process: int, wanted: Wanted, number: int = signal.SIGKILL, beside: Sequence[int] = ()) -> None:
        self._process, self._wanted, self._number, self._beside = process, wanted, number, beside
        self.view: StatusView | None = None
        self.at = 0.0

    def strike(self, pool: WorkerPool, ended: threading.Event) -> None:
        """beside: further processes that are hit at the same time."""
        slot = pool._board.slots[self._process]
        while not ended.is_set():
            pids = pool.pids
            pid = pids.get(self._process)
            if pid is None or not self._wanted(slot.read()):
                time.sleep(1e-4)
                continue
            os.kill(pid, signal.SIGSTOP)
            while state(pid) not in ("T", ""):
                pass
            if self._wanted(view := slot.read()):
                self.at, self.view = time.time(), view
                for number in (*self._beside, self._process):
                    with suppress(ProcessLookupError):  # on a busy machine it may have been lost for standing still
                        os.kill(pids[number], self._number)
                return
            os.kill(pid, signal.SIGCONT)


def in_step(number: int, instruction: str = "") -> Wanted:
    """Or in a later one: on a busy machine the moment may pass unseen."""

    def wanted(view: StatusView) -> bool:
        is_step = view.phase in ("step", "compile") and view.step >= number
        return is_step and bool(view.instruction) and view.instruction.startswith(instruction)

    return wanted


def changing(step: int) -> Wanted:
    """In the middle of a change of plan before a step: the phase is that of the first step, too."""
    return lambda view: view.phase == "compile" and view.step >= step


def in_phase(phase: str, step: int = 0) -> Wanted:
    """step: or a later one."""
    return lambda view: view.phase == phase and view.step >= step


def stored(folder: Path) -> dict[str, Tensor]:
    newest = checkpoint.latest(folder / "checkpoints")
    assert newest is not None
    opened = checkpoint.open(newest)
    return {name: opened.read(name) for name in opened.names()}


def ledger(folder: Path) -> list[tuple[int, int, float]]:
    """Step, samples consumed and loss of every step that counts, as rank 0's log has them."""
    found: list[tuple[int, int, float]] = []
    for record in read_log(folder / "log-rank0.jsonl"):
        if record["kind"] == "loss":
            found = [each for each in found if each[0] < record["step"]]
        elif record["kind"] == "step":
            found.append((record["step"], record["samples"], record["loss"]))
    return found


def require_same_run(found: Path, expected: Path) -> None:
    """Every sample exactly once, the losses and the parameters of the run that lost nobody."""
    mine, theirs = ledger(found), ledger(expected)
    assert [each[:2] for each in mine] == [each[:2] for each in theirs]
    assert [each[2] for each in mine] == pytest.approx([each[2] for each in theirs], rel=1e-9, abs=0.0)
    torch.testing.assert_close(stored(found), stored(expected), rtol=1e-7, atol=1e-10)


def losses_of_ranks(folder: Path) -> list[dict[str, Any]]:
    return records(folder, "loss")
