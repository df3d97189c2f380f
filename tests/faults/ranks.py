"""Training on a pool that stays: a run costs no new processes, so tests can afford many plans and many failures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from phalanx.launch.worker_pool import WorkerPool
from phalanx.plan.complete import needed_ranks
from phalanx.training.job import Summary, pack
from phalanx.training.trainer import Trainer, fit_on_rank
from tests.run_helpers import short_config


def fit(
    pool: WorkerPool,
    out: Path,
    model: Any,
    data: Any,
    on_event: Callable[[str, Any], None] | None = None,
    **options: Any,
) -> Summary:
    """What rank 0 of `phalanx.train` returns, on as many ranks of the pool as the plan needs."""
    trainer = Trainer(model, data, short_config(out, **options))
    with pack(trainer.job) as payload:
        ranks = needed_ranks(trainer.config.given_plan) or 1
        return pool.run(fit_on_rank, payload, world=ranks, on_event=on_event)[0]


class Breaks:
    """A dataset of which one sample cannot be read."""

    def __init__(self, size: int, broken: int) -> None:
        self._size, self._broken = size, broken

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if index == self._broken:
            raise OSError(f"sample {index} cannot be read")
        ids = torch.arange(16) + index
        return {"input_ids": ids, "labels": ids}
