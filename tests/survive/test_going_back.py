"""What is gone is gone back to the checkpoint that the run was told to go on from, until it has one of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.launch import newcomers
from phalanx.launch.worker_pool import WorkerPool
from phalanx.state import checkpoint
from tests.run_helpers import short_run
from tests.survive.runs import DATA, OPTIONS, Strike, fit, in_step, losses_of_ranks, stored

STEPS = {"steps": 10, "lr_steps": 10}


@pytest.mark.long
def test_a_run_that_went_on_from_another_goes_back_there_and_then_to_its_own(
    pool: WorkerPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where nobody is left of those who saw that it has one."""
    monkeypatch.setattr(newcomers, "_FIRST_WAIT", 0.0)  # one that is lost again comes at once all the same
    short_run("gpt2", DATA, tmp_path / "whole", **{**OPTIONS, **STEPS, "checkpoint_every": 4, "keep_checkpoints": 9})
    first = tmp_path / "whole/checkpoints/step-00000004"
    own, strikes = tmp_path / "own", [Strike(1, in_step(5, "BW"))]
    strikes += [Strike(1, in_step(8, "BW")), Strike(0, in_step(9, "BW"))]
    options = {**STEPS, "plan": "dp=2,zero=1", "resume": str(first), "checkpoint_every": 6, "keep_checkpoints": 9}
    fit(pool, own, 2, "replace", strikes=strikes, **options)
    there = [checkpoint.open(path).step for path in checkpoint.find(own / "checkpoints")]
    assert there == [10, 6]
    sources = [loss["source"].removeprefix("the checkpoint ") for loss in losses_of_ranks(own)]
    assert sources == [str(first), *[str(own / "checkpoints/step-00000006")] * 2]
    assert all(value.allclose(stored(tmp_path / "whole")[name]) for name, value in stored(own).items())
