"""Ranks whose main thread stands while their heart beats: they are lost, and only they."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx.launch.renewal import OnLoss
from phalanx.launch.worker_pool import WorkerPool
from phalanx.training.trainer import Trainer
from tests.run_helpers import short_config
from tests.survive.runs import OPTIONS, fit, losses_of_ranks, require_same_run
from tests.survive.test_survival import LEFT

STEPS = {**OPTIONS, "shuffle": False}


class Blocks:
    """A dataset whose sample 20, which of two replicas the second has in step 3, takes long once, for whoever asks
    first: for ever unless it is said how many seconds."""

    def __init__(self, mark: Path, seconds: float | None = None) -> None:
        self._mark, self._seconds = mark, seconds

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        with contextlib.suppress(FileExistsError):
            if index == 20:
                self._mark.touch(exist_ok=False)
                self.block()
        ids = (torch.arange(8) + index) % 64
        return {"input_ids": ids, "labels": ids}

    def block(self) -> None:
        if self._seconds is None:
            threading.Event().wait()
        time.sleep(self._seconds or 0.0)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of one process, in which nothing blocks."""
    out = tmp_path_factory.mktemp("alone")
    Trainer("gpt2", Blocks(out / "mark", 0.0), short_config(out, **STEPS)).fit()
    return out


def _losses(pool: WorkerPool, out: Path, on_loss: OnLoss, blocks: Blocks, **options: Any) -> list[dict[str, Any]]:
    trainer = Trainer("gpt2", blocks, short_config(out, **{**STEPS, "plan": "dp=2", "on_loss": on_loss, **options}))
    fit(pool, out, 2, on_loss, trainer=trainer)
    return losses_of_ranks(out)


@pytest.mark.long
@pytest.mark.parametrize("on_loss", ["shrink", "replace"])
def test_a_rank_that_blocks_while_its_heart_beats_is_lost_and_it_is_said_where_it_stands(
    on_loss: OnLoss, pool: WorkerPool, tmp_path: Path, alone: Path
) -> None:
    (loss,) = _losses(pool, tmp_path / "run", on_loss, Blocks(tmp_path / "mark"))
    require_same_run(tmp_path / "run", alone)
    (said,) = loss["lost"]
    words = r"rank 1 \(stage 0, replica 1\) did not go on for \d+ s, in which the others waited for it, in step 3; it "
    assert re.match(words + r"stands in wait \(threading.py:\d+\), .*, block \(test_hangs.py:\d+\)", said), said
    assert (loss["source"], loss["repeated"], loss["ranks"]) == (LEFT, 0, 1 if on_loss == "shrink" else 2)


@pytest.mark.long
def test_a_stage_that_blocks_is_lost_and_not_the_one_that_waits_for_it(
    pool: WorkerPool, tmp_path: Path, alone: Path
) -> None:
    """Both read all samples, and either may be first."""
    blocks = Blocks(tmp_path / "mark")
    (loss,) = _losses(pool, tmp_path / "run", "replace", blocks, plan="pp=2,mb=2", mirror_every=1)
    require_same_run(tmp_path / "run", alone)
    assert re.match(r"rank \d \(stage \d\) did not go on for \d+ s, in which .* block \(test_hangs.py", loss["lost"][0])


@pytest.mark.long
def test_a_rank_that_takes_many_steps_time_for_one_and_goes_on_is_not_lost(
    pool: WorkerPool, tmp_path: Path, alone: Path
) -> None:
    assert _losses(pool, tmp_path / "run", "shrink", Blocks(tmp_path / "mark", 3.0)) == []
    require_same_run(tmp_path / "run", alone)
