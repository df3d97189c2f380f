"""A change of plan that fails on one rank, wherever it fails, is refused on all of them, and all go on as they were."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from phalanx.adapt.migrate import ChangeRefused
from phalanx.engine.compiled import Compiled
from phalanx.errors import PhalanxError
from phalanx.launch.context import RankContext
from phalanx.launch.worker_pool import WorkerPool
from phalanx.model.segment.segments import Segment
from phalanx.params.rank_state import State
from phalanx.session.session import Opening
from phalanx.training.job import pack
from phalanx.training.trainer import Trainer, fit_on_rank
from tests.adapt import jobs
from tests.adapt.test_change import require_same
from tests.adapt.test_runs import DATA, OPTIONS, require_same_run
from tests.captured import GPT2
from tests.run_helpers import losses, records, short_config, short_run

PLANS = ["pp=3,mb=2", "dp=3,zero=1", "pp=3,mb=4"]


def refused(pool: WorkerPool, failing: str, at: int = 1) -> list[jobs.Trained]:
    """The second change fails on rank 1; a step later it is made."""
    expected = jobs.train(RankContext.alone(), GPT2, ["mb=2"], len(PLANS) + 1)
    found = pool.run(jobs.train_with_failure, GPT2, PLANS, failing, at, world=3)
    require_same(found[0], expected)
    assert all(each.refused == found[0].refused and len(each.refused) == 1 for each in found)
    return found


@pytest.mark.parametrize(("failing", "at", "reason"), [
    ("message", 3, "came damaged from rank 1 to rank"),
    ("room for messages", 2, "no room for model/"),
    pytest.param("room", 1, "no room for model/", marks=pytest.mark.long),
    pytest.param("room", 4, "no room for model/", marks=pytest.mark.long),
])  # fmt: skip
def test_one_that_fails_midway_is_moved_back(failing: str, at: int, reason: str, pool: WorkerPool) -> None:
    assert reason in refused(pool, failing, at)[0].refused[0]


@pytest.mark.parametrize(("failing", "reason"), [
    ("compile", r"plan pp=3,mb=4\S* cannot be made ready: RuntimeError: ptxas died"),
    pytest.param("moves", r"how state moves to plan pp=3,mb=4\S* cannot be found: KeyError: 'wte'",
                 marks=pytest.mark.long),
])  # fmt: skip
def test_whatever_is_raised_while_one_is_made_ready_is_its_reason(failing: str, reason: str, pool: WorkerPool) -> None:
    """Errors that nobody foresees, of libraries or our own, and only on one rank; that one has the traceback."""
    found = refused(pool, failing)
    (text,) = found[0].refused
    assert re.match(f"rank 1: {reason}\n", text) and "that rank's run log" in text
    assert [bool(each.traces[0]) for each in found] == [False, True, False]
    assert "Traceback" in found[1].traces[0] and "jobs.py" in found[1].traces[0]


@pytest.mark.parametrize(("failing", "reason"), [
    ("connect", "rank 1 could not connect to rank 0: refused\n  → look at it"),
    pytest.param("listen", "OSError: no more files", marks=pytest.mark.long),
])  # fmt: skip
def test_a_rank_that_cannot_connect_keeps_nobody_waiting(failing: str, reason: str, pool: WorkerPool) -> None:
    """The others hear of it and stop: rank 0 would wait for a minute, and then say that. The next attempt makes all
    groups anew."""
    (text,) = refused(pool, failing)[0].refused
    assert text.startswith("rank 1: the groups of plan pp=3,mb=4") and reason in text


@pytest.mark.parametrize(("failing", "at", "reason"), [
    ("state", 1, "what had moved cannot be put in place under plan pp=3,mb=4[^:]*: RuntimeError: the optimizer broke"),
    pytest.param("room from then on", 4, "failed halfway and could not be taken back: .*no room for .*; then .*no room",
                 marks=pytest.mark.long),
])  # fmt: skip
def test_a_rank_that_is_left_without_state_ends_all_with_one_error(
    failing: str, at: int, reason: str, pool: WorkerPool
) -> None:
    """No rank waits for it, and none trains on with half of what there was."""
    with pytest.raises(PhalanxError, match=reason) as ended:
        pool.run(jobs.train_with_failure, GPT2, PLANS, failing, at, world=3)
    assert (
        not isinstance(ended.value, ChangeRefused)
        and "go on from the newest checkpoint: --resume auto" in ended.value.hint
    )
    assert failing != "state" or ended.value.message.startswith("rank 1: ")


def _fit_where_state_is_lost(context: RankContext, payload: Any) -> Any:
    """On rank 1, when the plan changes; not on the one that comes in its place."""
    whole, breaks = Opening.state, context.rank == 1 and not (context.membership and context.membership.is_fresh)

    def state(self: Opening, compiled: Compiled, *arguments: Any, **options: Any) -> State:
        if breaks and compiled.plan.zero == 1:
            raise RuntimeError("the optimizer broke")
        return whole(self, compiled, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Opening, "state", state)
        return fit_on_rank(context, payload)


@pytest.mark.long
def test_where_losses_are_survived_a_rank_that_is_left_without_state_is_one(pool: WorkerPool, tmp_path: Path) -> None:
    options = {**OPTIONS, "on_loss": "replace", "checkpoint_every": 2}
    short_run("gpt2", DATA, tmp_path / "one", **OPTIONS)
    config = short_config(tmp_path / "two", **options, plan="dp=2", plan_at="4:dp=2,zero=1")
    with pack(Trainer("gpt2", DATA, config).job) as payload:
        pool.run(_fit_where_state_is_lost, payload, world=2, on_loss="replace")
    require_same_run(tmp_path / "two", tmp_path / "one")
    (loss,) = records(tmp_path / "two", "loss")
    assert "the optimizer broke" in loss["lost"][0]


def _fit_where_functions_fail(context: RankContext, payload: Any) -> Any:
    """On rank 1, from the third step on: whatever was made before stays."""
    whole = Segment._cut

    def cut(self: Segment, *arguments: Any) -> Any:
        if context.rank == 1 and context.slot.read().step >= 3:
            raise RuntimeError("ptxas died")
        return whole(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Segment, "_cut", cut)
        return fit_on_rank(context, payload)


def test_a_run_whose_functions_cannot_be_made_on_one_rank_trains_on(pool: WorkerPool, tmp_path: Path) -> None:
    """They are made before the switch, not by the first step after it. The rank that failed has the traceback."""
    options = {**OPTIONS, "batch_size": 10, "seq_len": 7, "steps": 4}  # shapes that no other test has
    short_run("gpt2", DATA, tmp_path / "one", **options)
    trainer = Trainer("gpt2", DATA, short_config(tmp_path / "two", **options, plan="pp=2,mb=5", plan_at="3:dp=2"))
    with pack(trainer.job) as payload:
        pool.run(_fit_where_functions_fail, payload, world=2)
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-9, abs=0.0)
    (told,) = records(tmp_path / "two", "change")
    assert told["refused"].startswith("rank 1: plan dp=2 cannot be made ready: RuntimeError: ptxas died")
    assert "traceback" not in told
    (own,) = records(tmp_path / "two", "change", rank=1)
    assert 'raise RuntimeError("ptxas died")' in own["traceback"]
