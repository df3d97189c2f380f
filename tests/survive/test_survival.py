"""Ranks are killed, stopped or fail while a run trains: the others go on, and the run is the one that lost nobody."""

from __future__ import annotations

import gc
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from phalanx.cli.main import app
from phalanx.config import RunConfig
from phalanx.engine.compiled import Compiled
from phalanx.engine.step import Outcome
from phalanx.errors import ConfigError, PlanError, RankError
from phalanx.launch.context import RankContext
from phalanx.launch.renewal import OnLoss
from phalanx.launch.worker_pool import WorkerPool
from phalanx.observe.requests import Request, ask, wait_for
from phalanx.plan.plan import Plan
from phalanx.prepare.read_model import plan_for
from phalanx.session.mirror import Copy
from phalanx.session.session import Opening
from phalanx.training.job import JobPayload
from phalanx.training.reporting import Reporter, StepFacts
from phalanx.training.trainer import Trainer, fit_on_rank
from tests.run_helpers import records, short_config, short_run
from tests.survive.runs import (
    DATA,
    OPTIONS,
    Strike,
    changing,
    fit,
    in_phase,
    in_step,
    ledger,
    losses_of_ranks,
    require_same_run,
    stored,
)

LEFT = "the ranks that were left"


def test_a_lost_rank_is_replaced_and_gets_its_state_from_its_replica(
    pool: WorkerPool, tmp_path: Path, alone: Path
) -> None:
    """Rank 0, with the lock, the log and the display of the run."""
    heard: list[tuple[str, Any]] = []
    strike = Strike(0, in_step(3, "BW"))
    found = fit(pool, tmp_path, 2, "replace", plan="dp=2", strikes=[strike], on_event=lambda *it: heard.append(it))
    require_same_run(tmp_path, alone)
    (loss,) = losses_of_ranks(tmp_path)
    assert strike.view is not None
    step = strike.view.step
    assert (loss["step"], loss["source"], loss["repeated"], loss["ranks"]) == (step, LEFT, 0, 2) and loss["bytes"] > 0
    assert 0 < loss["seconds"] < 60
    words = f"rank 0 (stage 0, replica 0) was killed by signal SIGKILL in step {step} at BW"
    assert loss["lost"][0].startswith(words)
    assert len(found.losses) == found.steps == 6
    assert [given[0]["step"] for name, given in heard if name == "on_step"] == [1, 2, 3, 4, 5, 6]
    assert [given[0]["generation"] for name, given in heard if name == "on_loss"] == [1]
    told = CliRunner().invoke(app, ["history", str(tmp_path)]).output
    assert f"2 ranks go on (replace) before step {step} with plan dp=2: state from the ranks that were left" in told


@pytest.mark.long
def test_ranks_that_lack_memory_for_what_others_held_go_on_with_a_plan_that_keeps_less(
    pool: WorkerPool, tmp_path: Path
) -> None:
    """One rank of two is left, and has no room for its part of the optimizer and what layers keep."""
    options = {"seq_len": 64, "plan": "dp=2,zero=1", "compile": "off"}
    needs = list[int]()
    for name, change in (("two", {}), ("one", {"plan": "mb=2"}), ("less", {"plan": "mb=2,recompute=block"})):
        ranks = 2 if name == "two" else 1
        fit(pool, tmp_path / name, ranks, "stop", **{**options, **change})
        needs.append(records(tmp_path / name, "memory")[0]["predicted_bytes"])
    assert needs[0] < needs[1] > needs[2], needs
    enough = f"{max(needs[0], needs[2]) // 1024 + 1}KiB"
    fit(pool, tmp_path / "run", 2, "shrink", **options, memory=enough, mirror_every=1, strikes=[Strike(1, in_step(4))])
    require_same_run(tmp_path / "run", tmp_path / "one")
    (loss,) = losses_of_ranks(tmp_path / "run")
    assert (loss["ranks"], loss["plan"]) == (1, "mb=2,recompute=block")


def test_ranks_that_are_left_go_on_with_a_plan_for_them(pool: WorkerPool, tmp_path: Path, alone: Path) -> None:
    """The first rank is lost: the second becomes rank 0, with micro-batches as large as before."""
    strike = Strike(0, in_step(3, "BW"))
    fit(pool, tmp_path, 2, "shrink", plan="dp=2", strikes=[strike])
    require_same_run(tmp_path, alone)
    (loss,) = losses_of_ranks(tmp_path)
    assert strike.view is not None
    assert (loss["step"], loss["source"], loss["ranks"], loss["plan"]) == (strike.view.step, LEFT, 1, "mb=2")


def test_a_rank_to_spare_takes_the_place_of_one_that_is_lost(pool: WorkerPool, tmp_path: Path, alone: Path) -> None:
    fit(pool, tmp_path, 3, "shrink", plan="dp=2", strikes=[Strike(0, in_step(3, "BW"))])
    require_same_run(tmp_path, alone)
    (loss,) = losses_of_ranks(tmp_path)
    assert (loss["source"], loss["repeated"], loss["ranks"], loss["plan"]) == (LEFT, 0, 2, "dp=2")


def test_ranks_are_spared_only_where_they_may_be_needed() -> None:
    costs = [1.0] * 4
    for on_loss, seen in (("shrink", 2), ("regrow", 2), ("stop", None), ("replace", None)):
        config = RunConfig.create(plan="dp=2", batch_size=8, on_loss=on_loss)
        if seen is not None:
            assert plan_for(config, "dp=2", 3, 8, costs).plan.world == seen
            continue
        with pytest.raises(PlanError, match="dp=2 does not divide the number of ranks: there are 3"):
            plan_for(config, "dp=2", 3, 8, costs)


def _without_two_replicas(context: RankContext, payload: Any) -> Any:
    """Rank 1 cannot make a plan of two ready, for a reason that nobody foresees."""
    whole, is_rank1 = Opening.compile, context.rank == 1

    def compile(self: Opening, plan: Plan, rank: int | None = None) -> Compiled:
        if is_rank1 and plan.dp == 2:
            raise RuntimeError("ptxas died")
        return whole(self, plan, rank)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Opening, "compile", compile)
        return fit_on_rank(context, payload)


def test_a_plan_that_one_rank_cannot_make_ready_gives_way_to_the_next(
    pool: WorkerPool, tmp_path: Path, alone: Path
) -> None:
    strike = Strike(2, in_step(3, "BW"))
    fit(pool, tmp_path, 3, "shrink", plan="dp=3", strikes=[strike], target=_without_two_replicas)
    require_same_run(tmp_path, alone)
    (loss,) = losses_of_ranks(tmp_path)
    assert (loss["ranks"], loss["plan"], loss["source"]) == (2, "pp=2,mb=3", LEFT)
    assert loss["refused"][0].startswith("rank 1: plan dp=2") and "RuntimeError: ptxas died" in loss["refused"][0]


def _telling_late(context: RankContext, payload: Any) -> Any:
    """As on a GPU, where a step is told of when the next one was begun."""

    def step(self: Reporter, facts: StepFacts, outcome: Outcome) -> None:
        self.flush()
        self._waiting = (facts, outcome)

    Reporter.step = step  # pyright: ignore[reportAttributeAccessIssue]
    return fit_on_rank(context, payload)


def test_a_step_that_was_not_told_of_when_a_rank_was_lost_is_told_of(
    pool: WorkerPool, tmp_path: Path, alone: Path
) -> None:
    fit(pool, tmp_path, 2, "shrink", plan="dp=2", strikes=[Strike(1, in_step(3, "F"))], target=_telling_late)
    require_same_run(tmp_path, alone)
    (loss,) = losses_of_ranks(tmp_path)
    assert (loss["source"], loss["repeated"], loss["ranks"]) == (LEFT, 0, 1)


def _slow_to_come(context: RankContext, payload: Any) -> Any:
    """A process that takes another's place needs longer than ranks wait for each other in a step."""
    if context.membership is not None and context.membership.is_fresh:
        time.sleep(5.0)
    return fit_on_rank(context, payload)


def test_a_process_that_takes_another_ones_place_has_the_time_it_needs(
    pool: WorkerPool, tmp_path: Path, alone: Path
) -> None:
    strike = Strike(1, in_step(3, "BW"))
    fit(pool, tmp_path, 2, "replace", plan="dp=2", strikes=[strike], target=_slow_to_come, timeout=2.0)
    require_same_run(tmp_path, alone)
    (loss,) = losses_of_ranks(tmp_path)
    assert (loss["source"], loss["ranks"], loss["generation"]) == (LEFT, 2, 1)
    assert loss["parts"]["start"] > 4.0 and loss["parts"]["meet"] < 2.0


def test_what_nobody_else_held_comes_from_the_newest_checkpoint(pool: WorkerPool, tmp_path: Path, alone: Path) -> None:
    strike = Strike(1, in_step(5, "F"))
    found = fit(pool, tmp_path, 2, "replace", plan="pp=2,mb=2", strikes=[strike], checkpoint_every=2)
    require_same_run(tmp_path, alone)
    assert found.losses == tuple(loss for _, _, loss in ledger(tmp_path)), "of steps that were undone there are none"
    (loss,) = losses_of_ranks(tmp_path)
    assert "checkpoints/step-0000000" in loss["source"] and loss["step"] in (3, 5)
    assert loss["repeated"] in (0, 1, 2, 3)
    assert loss["why"].startswith("nobody else held ")


class Slow(torch.optim.SGD):
    """Takes its time to update, so that a signal hits a rank when the others know that the step counts."""

    def step(self, closure: Any = None) -> None:
        time.sleep(0.3)
        super().step(closure)


def test_a_step_that_counts_is_not_made_again(pool: WorkerPool, tmp_path: Path) -> None:
    """A rank is lost in the middle of its update: the others end the step, and the new rank begins with the next."""

    def run(out: Path, strikes: list[Strike]) -> None:
        options = {**OPTIONS, "plan": "dp=2", "on_loss": "replace", "steps": 4}
        trainer = Trainer("gpt2", DATA, short_config(out, **options), optimizer_class=Slow)
        fit(pool, out, 2, "replace", strikes=strikes, trainer=trainer)

    run(tmp_path / "whole", [])
    strike = Strike(1, in_step(2, "STEP"))
    run(tmp_path / "struck", [strike])
    require_same_run(tmp_path / "struck", tmp_path / "whole")
    (loss,) = losses_of_ranks(tmp_path / "struck")
    assert strike.view is not None and (loss["step"], loss["source"]) == (strike.view.step + 1, LEFT)
    steps = [record["step"] for record in records(tmp_path / "struck", "step")]
    assert steps == [1, 2, 3, 4]


CASES: dict[str, tuple[int, OnLoss, str, list[Strike], dict[str, Any]]] = {
    "first step": (2, "replace", "dp=2", [Strike(0, in_step(1, "BW"))], {}),
    "last step": (2, "replace", "dp=2", [Strike(1, in_step(6))], {}),
    "norm": (2, "replace", "dp=2", [Strike(1, in_step(4, "NORM"))], {}),
    "two at once": (4, "replace", "pp=2,dp=2,mb=2", [Strike(2, in_step(3, "BW"), beside=[1])], {}),
    "one of both replicas of a stage": (
        4, "replace", "pp=2,dp=2,mb=2", [Strike(2, in_step(5, "BW"), beside=[3])], {"checkpoint_every": 2},
    ),
    "tensor member": (4, "replace", "tp=2,dp=2", [Strike(3, in_step(3, "BW"))], {}),
    "middle stage": (3, "replace", "pp=3,mb=2", [Strike(1, in_step(5, "F"))], {"checkpoint_every": 2}),
    "sharded parameters": (2, "replace", "dp=2,zero=3", [Strike(1, in_step(5, "F"))], {"checkpoint_every": 2}),
    "sharded in groups": (4, "replace", "dp=4,zero=1,zero_degree=2", [Strike(1, in_step(3, "BW"))], {}),
    "during recovery": (4, "replace", "dp=4", [Strike(3, in_step(3, "BW")), Strike(1, in_phase("recover"))], {}),
    "while saving": (2, "replace", "dp=2", [Strike(1, in_phase("save"))], {"checkpoint_every": 2}),
    "rank 0 while saving": (2, "shrink", "dp=2", [Strike(0, in_phase("save"))], {"checkpoint_every": 2}),
    "stopped": (2, "replace", "dp=2", [Strike(1, in_step(3, "BW"), signal.SIGSTOP)], {}),
    "stopped as it makes plans for fewer": (
        3, "shrink", "dp=3,mb=2", [Strike(1, in_phase("compile", 4), signal.SIGSTOP)], {},
    ),
    "of four": (4, "shrink", "dp=4", [Strike(0, in_step(3, "BW"))], {}),
    "twice": (4, "shrink", "dp=4", [Strike(0, in_step(2, "BW")), Strike(2, in_step(4))], {}),
    "of a pipeline": (4, "shrink", "pp=2,dp=2,mb=2", [Strike(2, in_step(3, "BW"))], {}),
    "before any checkpoint": (2, "replace", "pp=2,mb=2", [Strike(0, in_step(3, "F"))], {}),
    "stage with copies": (3, "shrink", "pp=3,mb=2", [Strike(1, in_step(5, "F"))], {"mirror_every": 2}),
    "shards with copies": (4, "replace", "dp=4,zero=3", [Strike(2, in_step(4, "BW"))], {"mirror_every": 1}),
    "twice with copies": (
        3, "shrink", "pp=3,mb=2", [Strike(0, in_step(3, "F")), Strike(1, in_step(5))], {"mirror_every": 1},
    ),
    "two neighbours with copies": (
        4, "replace", "pp=4,mb=4", [Strike(2, in_step(5, "BW"), beside=[1])],
        {"mirror_every": 1, "checkpoint_every": 2},
    ),
    "while copying": (2, "replace", "pp=2,mb=2", [Strike(1, in_phase("save"))], {"mirror_every": 1}),
    "while the plan changes": (2, "replace", "dp=2", [Strike(1, changing(4))], {"plan_at": "4:pp=2,mb=2"}),
    "while a plan of shards changes": (
        2, "replace", "dp=2,zero=1", [Strike(0, changing(4))], {"plan_at": "4:pp=2,mb=2", "mirror_every": 1},
    ),
    "before the plan changes": (2, "replace", "dp=2", [Strike(1, in_step(3, "STEP"))], {"plan_at": "4:pp=2,mb=2"}),
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_whoever_is_lost_whenever(name: str, pool: WorkerPool, tmp_path: Path, alone: Path) -> None:
    world, on_loss, plan, strikes, options = CASES[name]
    fit(pool, tmp_path, world, on_loss, plan=plan, strikes=strikes, **options)
    require_same_run(tmp_path, alone)
    assert 1 <= len(losses_of_ranks(tmp_path)) <= len(strikes)


class Fails:
    """A dataset that fails once, on whoever first asks for a sample."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if index == 20 and not self._mark.exists():
            self._mark.touch()
            os.abort()
        ids = torch.arange(16) + index
        return {"input_ids": ids, "labels": ids}


@pytest.mark.long
def test_with_fewer_than_the_least_number_of_ranks_lost_ones_are_replaced(pool: WorkerPool, tmp_path: Path) -> None:
    strikes = [Strike(1, in_step(3, "BW"))]
    fit(pool, tmp_path, 2, "shrink", plan="dp=2", strikes=strikes, min_ranks=2)
    (loss,) = losses_of_ranks(tmp_path)
    assert (loss["ranks"], loss["plan"]) == (2, "dp=2")


@pytest.mark.long
def test_a_rank_that_crashes_by_itself_is_replaced(pool: WorkerPool, tmp_path: Path) -> None:
    config = short_config(tmp_path / "run", **{**OPTIONS, "plan": "dp=2", "on_loss": "replace", "shuffle": False})
    trainer = Trainer("gpt2", Fails(tmp_path / "mark"), config)
    fit(pool, tmp_path / "run", 2, "replace", trainer=trainer)
    (loss,) = losses_of_ranks(tmp_path / "run")
    assert "SIGABRT" in loss["lost"][0] and loss["source"] == LEFT


def test_what_happens_again_and_again_ends_the_run(pool: WorkerPool, tmp_path: Path) -> None:
    """Every rank that comes to it dies of the same sample."""
    config = short_config(tmp_path / "run", **{**OPTIONS, "plan": "dp=2", "on_loss": "shrink", "shuffle": False})
    trainer = Trainer("gpt2", AlwaysFails(), config)
    with pytest.raises(RankError) as ended:
        fit(pool, tmp_path / "run", 2, "shrink", trainer=trainer)
    assert "was killed by signal SIGABRT" in str(ended.value)
    assert "the others did not go on without it: no rank is left that could go on" in str(ended.value)


class AlwaysFails(Fails):
    def __init__(self) -> None:
        super().__init__(Path("/nowhere"))

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if index in (20, 21, 22, 23, 16, 17, 18, 19):
            os.abort()
        ids = torch.arange(16) + index
        return {"input_ids": ids, "labels": ids}


def test_where_nobody_can_be_survived_that_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        short_run("gpt2", DATA, tmp_path, **OPTIONS, on_loss="replace")
    assert "option on_loss = 'replace' is not supported here: the only rank of a run cannot be" in str(refused.value)


def lost_before_training(context: RankContext, payload: JobPayload) -> Any:
    if context.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return fit_on_rank(context, payload)


def test_a_rank_that_is_lost_before_training_ends_the_job(pool: WorkerPool, tmp_path: Path) -> None:
    with pytest.raises(RankError) as ended:
        fit(pool, tmp_path, 2, "replace", plan="dp=2", target=lost_before_training)
    assert "the others did not go on without it: the ranks were not training yet, or not any more" in str(ended.value)


COPIES = "copies of step"


def test_what_nobody_else_held_comes_from_copies_in_other_ranks_memory(
    pool: WorkerPool, tmp_path: Path, alone: Path
) -> None:
    """A stage without a replica: its state was copied after the last step. That the other rank has its copy by then is
    certain once there is something to do backward: that came from it."""
    strike = Strike(1, in_step(5, "BW"))
    fit(pool, tmp_path, 2, "replace", plan="pp=2,mb=2", strikes=[strike], mirror_every=1)
    require_same_run(tmp_path, alone)
    (loss,) = losses_of_ranks(tmp_path)
    assert strike.view is not None
    assert loss["source"].startswith(f"{COPIES} {strike.view.step - 1} in the memory of") and loss["repeated"] == 0
    assert loss["why"].startswith("nobody else held ")
    first = records(tmp_path, "mirror")[0]
    assert (first["step"], first["every"]) == (1, 1) and first["moved"] > 0


def test_ranks_go_on_with_fewer_and_take_a_new_one_in_when_it_is_ready(pool: WorkerPool, tmp_path: Path) -> None:
    """Nobody waits for it: it prepares itself beside the run, and comes in between two steps. What the options want
    meanwhile is for all of them."""
    options = {**OPTIONS, "steps": 14}
    Trainer("gpt2", DATA, short_config(tmp_path / "whole", **options), optimizer_class=torch.optim.SGD).fit()
    config = short_config(tmp_path / "struck", **options, plan="dp=2", on_loss="regrow", plan_at="4:dp=2,zero=1")
    trainer = Trainer("gpt2", DATA, config, optimizer_class=Slow)
    fit(pool, tmp_path / "struck", 2, "regrow", strikes=[Strike(1, in_step(2, "BW"))], trainer=trainer)
    require_same_run(tmp_path / "struck", tmp_path / "whole")
    lost, came = losses_of_ranks(tmp_path / "struck")
    assert (lost["ranks"], lost["plan"], came["ranks"], came["plan"]) == (1, "mb=2", 2, "dp=2,zero=1")
    assert came["lost"] == ["a process came to be rank 1"] and came["source"] == LEFT and came["repeated"] == 0
    assert came["step"] > lost["step"]
    (changed,) = records(tmp_path / "struck", "change")
    assert changed["how"] == "as the options say, for the ranks that there are" and "refused" not in changed


@pytest.mark.long
def test_a_plan_for_more_ranks_than_there_are_gets_them(pool: WorkerPool, tmp_path: Path) -> None:
    """They are started beside the run, taken in between two steps, and the plan changes once all are ready for it."""
    out, options, asked = tmp_path / "grown", {**OPTIONS, "steps": 40}, list[Request]()
    Trainer("gpt2", DATA, short_config(tmp_path / "whole", **options), optimizer_class=torch.optim.SGD).fit()

    def on_event(name: str, given: Any) -> None:
        if name == "on_step" and given[0]["step"] == 2:
            asked.append(ask(out, "dp=3"))

    config = short_config(out, **options, plan="dp=2", on_loss="shrink")
    fit(pool, out, 2, "shrink", trainer=Trainer("gpt2", DATA, config, optimizer_class=Slow), on_event=on_event)
    require_same_run(out, tmp_path / "whole")
    (came,) = losses_of_ranks(out)
    assert came["ranks"] == 3 and came["plan"] == "dp=2" and came["lost"] == ["a process came to be rank 2"]
    (changed,) = records(out, "change")
    answer = wait_for(out, asked[0], 0.0)
    assert answer is not None and (changed["plan"], changed["step"]) == (answer.plan, answer.step)
    assert answer.plan == "dp=3" and answer.step >= came["step"]


class Damages(Fails):
    """A dataset that turns a bit in every copy that a rank has, when it first asks for a sample of step 6."""

    done = False

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if index >= 40 and not self.done:
            self.done = True
            for copy in [each for each in gc.get_objects() if type(each) is Copy]:
                next(iter(copy.data.values())).view(torch.uint8)[:1] ^= 1
        ids = (torch.arange(8) + index) % 64
        return {"input_ids": ids, "labels": ids}


@pytest.mark.long
def test_a_damaged_copy_is_not_used_and_that_is_said(pool: WorkerPool, tmp_path: Path) -> None:
    options = {**OPTIONS, "shuffle": False, "checkpoint_every": 2}
    Trainer("gpt2", Damages(tmp_path), short_config(tmp_path / "whole", **options)).fit()
    config = short_config(tmp_path / "struck", **options, plan="pp=2,mb=2", on_loss="replace", mirror_every=4)
    trainer, strikes = Trainer("gpt2", Damages(tmp_path), config), [Strike(1, in_step(6, "F"))]
    fit(pool, tmp_path / "struck", 2, "replace", strikes=strikes, trainer=trainer)
    require_same_run(tmp_path / "struck", tmp_path / "whole")
    (loss,) = losses_of_ranks(tmp_path / "struck")
    assert "checkpoints/step-0000000" in loss["source"]
    assert "the copy of step 5 in the memory of rank 0 was damaged" in loss["why"]


@pytest.mark.long
def test_an_optimizer_of_whole_matrices_goes_on_from_the_newest_checkpoint(pool: WorkerPool, tmp_path: Path) -> None:
    options = {**OPTIONS, "optimizer": "muon", "dtype": "float32", "plan": "dp=2"}
    fit(pool, tmp_path / "whole", 2, "replace", **options)
    strikes = [Strike(1, in_step(5, "F"))]
    fit(pool, tmp_path / "struck", 2, "replace", strikes=strikes, checkpoint_every=2, mirror_every=1, **options)
    (loss,) = losses_of_ranks(tmp_path / "struck")
    assert "checkpoints/step-0000000" in loss["source"]
    (said,) = records(tmp_path / "struck", "mirror")[:1]
    assert said["none"] == "the optimizer updates matrices whole: what is lost comes from the newest checkpoint"
    assert [each[:2] for each in ledger(tmp_path / "struck")] == [each[:2] for each in ledger(tmp_path / "whole")]
    torch.testing.assert_close(stored(tmp_path / "struck"), stored(tmp_path / "whole"))
