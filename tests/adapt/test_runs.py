"""A run whose plan, batch size or sample length changes on the way is the run of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from phalanx.launch.worker_pool import WorkerPool
from phalanx.state import checkpoint
from phalanx.training.job import pack
from phalanx.training.trainer import Trainer, fit_on_rank
from tests.run_helpers import losses, records, short_config, short_run

OPTIONS = {
    "dtype": "float64", "batch_size": 8, "lr": 3e-3, "warmup_steps": 2, "clip": 0.5, "seed": 3, "export": False,
    "device": "cpu", "steps": 6, "seq_len": 8,
}  # fmt: skip
DATA = "synthetic:13"


def fit(pool: WorkerPool, out: Path, world: int, model: str = "gpt2", on_event: Any = None, **options: Any) -> Any:
    trainer = Trainer(model, DATA, short_config(out, **{**OPTIONS, **options}))
    with pack(trainer.job) as payload:
        return pool.run(fit_on_rank, payload, world=world, on_event=on_event)[0]


def stored(folder: Path) -> dict[str, Tensor]:
    newest = checkpoint.latest(folder / "checkpoints")
    assert newest is not None
    opened = checkpoint.open(newest)
    return {name: opened.read(name) for name in opened.names()}


def require_same_run(found: Path, expected: Path) -> None:
    assert losses(found) == pytest.approx(losses(expected), rel=1e-9, abs=0.0)
    torch.testing.assert_close(stored(found), stored(expected), rtol=1e-7, atol=1e-10)


def test_a_run_follows_its_options_from_plan_to_plan(pool: WorkerPool, tmp_path: Path) -> None:
    short_run("gpt2", DATA, tmp_path / "one", **OPTIONS)
    plans = ("3:pp=2,dp=1,mb=4", "4:dp=4,zero=1", "6:pp=3,mb=2")
    fit(pool, tmp_path / "four", 4, plan="pp=2,tp=2,mb=2", plan_at=plans)
    require_same_run(tmp_path / "four", tmp_path / "one")
    changes = records(tmp_path / "four", "change")
    assert [(each["step"], each["how"]) for each in changes] == [(step, "as the options say") for step in (3, 4, 6)]
    assert [each["old"] for each in changes[1:]] == [each["plan"] for each in changes[:-1]]
    assert all(each["bytes"] > 0 and each["seconds"] > 0 for each in changes)
    newest = checkpoint.latest(tmp_path / "four" / "checkpoints")
    assert newest is not None
    assert [each["step"] for each in checkpoint.open(newest).state["plans"]] == [1, 3, 4, 6]


def test_batches_and_samples_grow_with_the_plan_and_a_resumed_run_sees_the_same(
    pool: WorkerPool, tmp_path: Path
) -> None:
    grown = {"batch_size_at": ("3:4", "5:12"), "seq_len_at": "4:16", "eval_data": "synthetic:5", "eval_every": 2}
    short_run("gpt2", DATA, tmp_path / "one", **OPTIONS, **grown)
    samples = [record["samples"] for record in records(tmp_path / "one", "step")]
    assert samples == [8, 16, 20, 24, 36, 48]
    plans = ("2:dp=2,zero=3", "4:pp=2,slices=2,mb=2")
    fit(pool, tmp_path / "two", 2, plan="pp=2,mb=2", plan_at=plans, **grown)
    require_same_run(tmp_path / "two", tmp_path / "one")
