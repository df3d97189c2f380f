"""A run for several machines whose steps take long until a file says that they need not: `OUT RELEASE ON_LOSS PLAN
MIRROR_EVERY [MIN_RANKS]`. With TEST_GREEDY memory does not suffice for its first plans (`tests/greedy.py`)."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

from phalanx.config import RunConfig
from phalanx.training.trainer import Trainer

STEPS = 40  # so that a run that is not released lasts longer than whatever is waited for


class Patient:
    """Samples that come slowly at first."""

    def __init__(self, release: Path) -> None:
        self._release = release

    def __len__(self) -> int:
        return 4 * STEPS

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if index >= 8 and not self._release.exists():
            time.sleep(2.0)
        ids = (torch.arange(8) + index) % 64
        return {"input_ids": ids, "labels": ids}


def config(out: Path, **options: Any) -> RunConfig:
    given = {
        "tiny": True, "seq_len": 8, "batch_size": 4, "steps": STEPS, "lr": 3e-3, "export": False, "device": "cpu",
        "dtype": "float64", "progress": "off", "silence": 5.0, "shuffle": False, "compile": "off", "out": str(out),
        "checkpoint_every": 2,
        **options,
    }  # fmt: skip
    return RunConfig.create(**given)


if __name__ == "__main__":
    out, release, on_loss, plan, every, *least = sys.argv[1:]
    from tests.survive.spread_run import Patient as Samples  # as ranks that unpickle it know it

    options = {"plan": plan, "on_loss": on_loss, "mirror_every": int(every) if every.isdecimal() else every}
    options |= {"min_ranks": int(least[0])} if least else {}
    if "TEST_GREEDY" in os.environ:
        options |= {"optimizer": "tests.greedy.Greedy", "steps": 4}
    Trainer("gpt2", Samples(Path(release)), config(Path(out), **options)).fit()
