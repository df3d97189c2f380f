"""Processes that are to take the place of a lost rank, and cannot: the others go on, or wait, and it is tried again."""

from __future__ import annotations

import os
import signal
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx.errors import ConfigError
from phalanx.launch.context import RankContext
from phalanx.launch.worker_pool import WorkerPool
from phalanx.training.trainer import Trainer, fit_on_rank
from tests.run_helpers import records, short_config
from tests.survive.runs import (
    DATA,
    OPTIONS,
    Strike,
    fit,
    in_phase,
    in_step,
    ledger,
    losses_of_ranks,
    require_same_run,
    stored,
)
from tests.survive.test_survival import LEFT, Slow

LONGER = {**OPTIONS, "steps": 18}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of one process, which nobody leaves."""
    out = tmp_path_factory.mktemp("whole")
    Trainer("gpt2", DATA, short_config(out, **LONGER), optimizer_class=torch.optim.SGD).fit()
    return out


def _cannot_begin(mark: Path, how: str, context: RankContext, payload: Any) -> Any:
    """The first process that comes to the run, or all of them."""
    if context.membership is not None and context.membership.is_fresh and (how == "never" or not mark.exists()):
        mark.touch()
        if how == "dies":
            os._exit(3)
        raise ConfigError("no CUDA device can be used", "look")
    return fit_on_rank(context, payload)


def _train(pool: WorkerPool, out: Path, how: str, **options: Any) -> list[dict[str, Any]]:
    config = short_config(out, **{**LONGER, "plan": "dp=2", "on_loss": "replace", **options})
    trainer = Trainer("gpt2", DATA, config, optimizer_class=Slow)
    target = partial(_cannot_begin, out / "mark", how)
    fit(pool, out, 2, "replace", trainer=trainer, target=target, strikes=[Strike(1, in_step(2, "BW"))])
    return losses_of_ranks(out)


def test_a_replacement_that_cannot_start_is_tried_again_and_the_others_go_on_meanwhile(
    pool: WorkerPool, tmp_path: Path, whole: Path
) -> None:
    lost, came = _train(pool, tmp_path, "refuses")
    require_same_run(tmp_path, whole)
    assert lost["lost"][0].startswith("rank 1 (stage 0, replica 1) was killed by signal SIGKILL in step")
    assert lost["lost"][1:] == ["the process that was to be rank 1 failed (no CUDA device can be used) during start"]
    assert (lost["ranks"], lost["plan"], lost["source"]) == (1, "mb=2", LEFT)
    assert came["lost"] == ["a process came to be rank 1"] and (came["ranks"], came["plan"]) == (2, "dp=2")


@pytest.mark.long
def test_with_too_few_ranks_the_others_wait_for_a_replacement_that_is_tried_again(
    pool: WorkerPool, tmp_path: Path, whole: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (lost,) = _train(pool, tmp_path, "dies", min_ranks=2)
    require_same_run(tmp_path, whole)
    assert (lost["ranks"], lost["plan"], lost["repeated"]) == (2, "dp=2", 0)
    again = "the process that was to be rank 1 left with exit code 3 during start"
    assert lost["lost"][1:] == [again, "a process came to be rank 1"]
    assert f"{again}; fewer ranks are left than min_ranks" in capfd.readouterr().err


@pytest.mark.long
def test_ranks_that_wait_for_others_are_saved_when_the_run_is_asked_to_end(
    pool: WorkerPool, tmp_path: Path, whole: Path
) -> None:
    def interrupt() -> None:
        while not (tmp_path / "mark").exists() or pool.board.slots[0].awaited < 3:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        _train(pool, tmp_path, "never", min_ranks=2)
    (lost,) = losses_of_ranks(tmp_path)
    assert (lost["ranks"], lost["plan"], lost["repeated"]) == (1, "mb=2", 0)
    config = short_config(tmp_path, **LONGER, resume="auto")
    Trainer("gpt2", DATA, config, optimizer_class=Slow).fit()
    torch.testing.assert_close(stored(tmp_path), stored(whole), rtol=1e-7, atol=1e-10)
    assert len(ledger(tmp_path)) == 18


@pytest.mark.long
def test_a_run_that_ends_early_ends_although_a_rank_is_lost_on_the_way_out(pool: WorkerPool, tmp_path: Path) -> None:
    """As it shows what the model writes, with its last checkpoint on its way."""
    config = short_config(
        tmp_path, **OPTIONS | {"steps": 12, "lr": 1e-30, "warmup_steps": 0}, plan="dp=2", on_loss="replace",
        eval_data="stdlib", eval_every=2, early_stop=1, generate_every=4, generate_prompts="x", generate_tokens=2,
    )  # fmt: skip
    strike = Strike(1, in_phase("generate", 4))
    found = fit(pool, tmp_path, 2, "replace", strikes=[strike], trainer=Trainer("phalanx-demo", "stdlib", config))
    assert found.steps == 4 and found.checkpoint == tmp_path / "checkpoints" / "step-00000004"
    assert [each["step"] for each in records(tmp_path, "ended")] == [4]
