"""Ranks that mirror each other by gradients: whoever is lost whenever, nothing that counts is made again."""

from __future__ import annotations

import gc
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx.launch.renewal import OnLoss
from phalanx.launch.worker_pool import WorkerPool
from phalanx.observe.story import mirror_words
from phalanx.params.mirrored import Mirrored
from phalanx.session.mirroring import Trial
from phalanx.state.snapshot import Snapshot
from phalanx.training.trainer import Trainer
from tests.run_helpers import records, short_config, short_run
from tests.survive.runs import (
    DATA,
    OPTIONS,
    Strike,
    fit,
    in_phase,
    in_step,
    losses_of_ranks,
    require_same_run,
    stored,
)


def mirrored(lost: int, by: int) -> str:
    return f"the ranks that were left; of rank {lost} from the mirror on rank {by}"


def test_a_lost_stage_comes_from_its_mirror(pool: WorkerPool, tmp_path: Path, alone: Path) -> None:
    strike = Strike(1, in_step(4))
    fit(pool, tmp_path, 2, "replace", plan="pp=2,mb=2", strikes=[strike], mirror_every=0)
    (lost,) = losses_of_ranks(tmp_path)
    assert strike.view is not None and lost["step"] - strike.view.step in (0, 1)  # the next, where its norm was known
    assert lost["source"] == mirrored(1, 0) and lost["repeated"] == 0 and "why" not in lost
    require_same_run(tmp_path, alone)


CASES: dict[str, tuple[int, OnLoss, str, int, int]] = {  # ranks, what then, plan, who is lost, whose mirror it is on
    "first stage": (2, "replace", "pp=2,mb=2", 0, 1),
    "tensor part": (4, "replace", "pp=2,tp=2,mb=2", 2, 3),
    "shard of the optimizer": (2, "replace", "dp=2,zero=1", 1, 0),
    "shard of parameters": (2, "replace", "dp=2,zero=3", 0, 1),
    "stage, with fewer": (3, "shrink", "pp=3,mb=2", 1, 2),
    "shard, with fewer": (3, "shrink", "dp=3,zero=2", 2, 0),
    "last stage, on the host": (2, "replace", "pp=2,mb=2,offload=optimizer", 1, 0),
}


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_whoever_is_lost_whenever(name: str, pool: WorkerPool, tmp_path: Path, alone: Path) -> None:
    world, on_loss, plan, lost, by = CASES[name]
    chance = random.Random(name)
    strike = Strike(lost, in_step(chance.randint(1, 4), chance.choice(["", "F", "BW", "NORM", "STEP"])))
    fit(pool, tmp_path, world, on_loss, plan=plan, strikes=[strike], mirror_every=0)
    (loss,) = losses_of_ranks(tmp_path)
    assert loss["source"] == mirrored(lost, by) and loss["repeated"] == 0
    require_same_run(tmp_path, alone)


@pytest.mark.long
def test_mirrors_are_made_again_after_a_loss_and_a_change_of_plan(
    pool: WorkerPool, tmp_path: Path, alone: Path
) -> None:
    strikes = [Strike(1, in_step(2)), Strike(0, in_step(5))]
    options = {"plan": "pp=2,mb=2", "plan_at": "4:dp=2,zero=1", "mirror_every": 0}
    fit(pool, tmp_path, 2, "replace", strikes=strikes, **options)
    assert [loss["source"] for loss in losses_of_ranks(tmp_path)] == [mirrored(1, 0), mirrored(0, 1)]
    require_same_run(tmp_path, alone)


@pytest.mark.long
def test_a_rank_that_is_lost_with_its_mirror_comes_from_the_checkpoint(
    pool: WorkerPool, tmp_path: Path, alone: Path
) -> None:
    strike = Strike(2, in_step(5), beside=[1])
    fit(pool, tmp_path, 4, "replace", plan="pp=4,mb=4", strikes=[strike], mirror_every=0, checkpoint_every=2)
    (loss,) = losses_of_ranks(tmp_path)
    assert "checkpoints/step-0000000" in loss["source"] and "; no mirror of rank 1 was left" in loss["why"]
    require_same_run(tmp_path, alone)


@pytest.mark.long
def test_a_second_loss_while_the_first_is_recovered_from(pool: WorkerPool, tmp_path: Path, alone: Path) -> None:
    """Ranks 1 and 3, of which neither mirrors the other."""
    strikes = [Strike(1, in_step(3)), Strike(3, in_phase("recover"))]
    fit(pool, tmp_path, 4, "replace", plan="pp=4,mb=4", strikes=strikes, mirror_every=0)
    assert all("from the mirror on rank" in loss["source"] for loss in losses_of_ranks(tmp_path))
    require_same_run(tmp_path, alone)


class Damages:
    """A dataset that turns a bit in what a rank mirrors, when it first asks for a sample of step 4."""

    done = False

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if index >= 24 and not self.done:
            self.done = True
            for mirror in [each for each in gc.get_objects() if type(each) is Mirrored]:
                next(iter(mirror.weights.values())).exact.view(torch.uint8).reshape(-1)[:1] ^= 1
        ids = (torch.arange(8) + index) % 64
        return {"input_ids": ids, "labels": ids}


@pytest.mark.long
def test_a_damaged_mirror_is_not_used_and_that_is_said(pool: WorkerPool, tmp_path: Path) -> None:
    """Damaged in step 4, which updates it once more, and needed in step 6."""
    options = {**OPTIONS, "shuffle": False, "checkpoint_every": 2}
    Trainer("gpt2", Damages(), short_config(tmp_path / "whole", **options)).fit()
    config = short_config(tmp_path / "struck", **options, plan="pp=2,mb=2", on_loss="replace", mirror_every=0)
    trainer, strikes = Trainer("gpt2", Damages(), config), [Strike(1, in_step(6))]
    fit(pool, tmp_path / "struck", 2, "replace", strikes=strikes, trainer=trainer)
    require_same_run(tmp_path / "struck", tmp_path / "whole")
    (loss,) = losses_of_ranks(tmp_path / "struck")
    assert "checkpoints/step-0000000" in loss["source"]
    assert "the mirror of rank 1 in the memory of rank 0 was damaged" in loss["why"]


@pytest.mark.long
def test_a_deterministic_run_has_the_same_bits(pool: WorkerPool, tmp_path: Path) -> None:
    options: dict[str, Any] = {**OPTIONS, "dtype": "float32", "deterministic": True, "plan": "pp=2"}
    fit(pool, tmp_path / "whole", 2, "replace", **options)
    fit(pool, tmp_path / "struck", 2, "replace", strikes=[Strike(0, in_step(4))], mirror_every=0, **options)
    (loss,) = losses_of_ranks(tmp_path / "struck")
    assert loss["source"] == mirrored(0, 1)
    expected = stored(tmp_path / "whole")
    found = stored(tmp_path / "struck")
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.long
def test_what_mirrors_cost_decides_where_nobody_said_how(pool: WorkerPool, tmp_path: Path) -> None:
    """Steps of a tiny model are so short that copies are taken instead, after five steps on trial that follow two."""
    short_run("gpt2", DATA, tmp_path / "alone", **{**OPTIONS, "steps": 8})
    fit(pool, tmp_path / "run", 2, "replace", plan="pp=2,mb=2", mirror_every="auto", steps=8)
    first, then = records(tmp_path / "run", "mirror")[:2]
    assert (first["every"], first["step"], then["step"]) == (0, 0, 7)
    assert then["share"] <= 0.01 if then["every"] == 0 else then["share"] > 0.01
    require_same_run(tmp_path / "run", tmp_path / "alone")


def test_mirrors_are_told_in_words() -> None:
    record = {"step": 0, "every": 0, "bytes": 2**21, "moved": 1, "seconds": 0.1}
    told = "what one rank alone holds is mirrored in another's memory, step by step (2.0 MiB on rank 0)"
    assert mirror_words(record) == told
    assert mirror_words({**record, "share": 0.0041}) == f"{told}: 0.41 % of the time"
    assert mirror_words({**record, "every": 20, "share": 0.073}) == (
        "what one rank alone holds is copied into other ranks' memory every 20 steps (2.0 MiB on rank 0): to mirror it "
        "step by step would take 7.3 % of the time"
    )


class _Costs:
    """A rank that mirrors, at so many seconds per step."""

    def __init__(self, seconds: float) -> None:
        self.cost = lambda: seconds


class _Told:
    """A group of this rank and one whose mirror takes 3 ms of a step."""

    def texts(self, text: str) -> list[str]:
        return [text, json.dumps([0.003, 0.0])]


@pytest.mark.parametrize(("step_seconds", "is_cheap"), [(0.31, True), (0.29, False)])
def test_mirrors_stay_where_the_dearest_takes_a_hundredth_of_a_step_at_most(
    step_seconds: float, is_cheap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps before the first look do not count: they compile."""
    monkeypatch.setattr("phalanx.session.mirroring.everyone", lambda member: _Told())
    snapshot, trial, live, member = Snapshot({}, "", "", 9), Trial(), _Costs(0.002), object()
    snapshot.step, snapshot.seconds = 2, 50.0
    assert not trial.measure(live, member, snapshot) and trial.share is None  # pyright: ignore[reportArgumentType]
    snapshot.step, snapshot.seconds = 5, 50.0 + 3 * step_seconds
    assert trial.measure(live, member, snapshot)  # pyright: ignore[reportArgumentType]
    assert trial.share == pytest.approx(0.003 / step_seconds) and trial.is_cheap == is_cheap
