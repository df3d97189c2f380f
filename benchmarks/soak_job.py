"""What a run of the soak trains, and what is said of the faults that happen to it."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from soak_faults import HAPPENS, slow_samples
from torch import Tensor

from phalanx.config import RunConfig

STEPS, BATCH, TOKENS = 96, 8, 8
_HELD, _HELD_SECONDS = "held", 1.0


def config(out: Path, **options: Any) -> RunConfig:
    given = {
        "tiny": True, "dtype": "float64", "seq_len": TOKENS, "batch_size": BATCH, "steps": STEPS, "lr": 3e-3,
        "warmup_steps": 2, "clip": 0.5, "seed": 3, "shuffle": False, "export": False, "device": "cpu",
        "progress": "off", "timeout": 150.0, "silence": 3.0, "out": str(out), **options,
    }  # fmt: skip
    return RunConfig.create(**given)


class Samples:
    """Tokens that follow from a sample's number. orders: a folder; what a file in it says happens to the process whose
    number is its name, when that asks for its next sample. seconds: that each takes; held runs are slower."""

    def __init__(self, orders: Path | None = None, seconds: float = 0.0) -> None:
        self._orders, self._seconds = orders, seconds

    def __len__(self) -> int:
        return STEPS * BATCH

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if self._orders is not None:
            _show_life(self._orders / f"{os.getpid()}.reads")
            _obey(self._orders / str(os.getpid()))
        is_held = self._orders is not None and (self._orders / _HELD).exists()
        time.sleep(slow_samples.pop() if slow_samples else _HELD_SECONDS if is_held else self._seconds)
        ids = (torch.arange(TOKENS) * 7 + index * 13) % 97
        return {"input_ids": ids, "labels": ids}


@contextlib.contextmanager
def hold(orders: Path) -> Iterator[None]:
    """Within it steps take long, so that a run does not end before what it waits for has come."""
    (orders / _HELD).touch()
    try:
        yield
    finally:
        (orders / _HELD).unlink(missing_ok=True)


def give_order(orders: Path, pid: int, what: str) -> Path:
    """A file that is gone once the process has begun to obey."""
    written, order = orders / f"{pid}.new", orders / str(pid)
    written.write_text(what)
    return written.rename(order)


def _show_life(path: Path) -> None:
    """Says that this process reads samples; asked by SIGUSR2, it writes where its threads stand into the same file."""
    if not path.exists():
        faulthandler.register(signal.SIGUSR2, path.open("w"))


def _obey(order: Path) -> None:
    if order.exists():
        what = order.read_text()
        order.unlink()
        HAPPENS[what]()


@dataclass(frozen=True)
class Fault:
    """gap: steps after the recovery from the one before. delay: seconds into the step. seed: of whom it hits."""

    kind: str
    gap: int
    delay: float
    seed: int


@dataclass
class Struck:
    """A fault that happened. ranks: how many there were. why: of a run that ended with it and was resumed. losses:
    seconds from when each was noticed to going on, and where state came from."""

    kind: str
    step: int
    ranks: int
    time: float
    why: str = ""
    losses: list[float] = field(default_factory=list[float])
    sources: list[str] = field(default_factory=list[str])

    def record(self) -> dict[str, Any]:
        outcome = "resumed" if self.why else "went on" if self.losses else "untouched"
        return asdict(self) | {"outcome": outcome}
