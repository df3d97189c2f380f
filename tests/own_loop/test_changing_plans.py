"""A loop of one's own changes its plan between steps and goes on as the one that did not."""

from __future__ import annotations

import pytest
import torch

from phalanx.adapt.migrate import ChangeRefused
from phalanx.errors import ConfigError, PlanError
from phalanx.launch.context import RankContext
from phalanx.launch.worker_pool import WorkerPool
from tests.own_loop import jobs
from tests.own_loop.jobs import both, net, numbers, opened


def test_optimizer_and_scheduler_go_on_under_other_plans(pool: WorkerPool) -> None:
    expected = jobs.changing(RankContext.alone(), ["mb=2"], steps=6)
    found = pool.run(jobs.changing, ["pp=2,mb=2", "dp=2,zero=1", "tp=2"], world=2)[0]
    assert found.losses == pytest.approx(expected.losses, rel=1e-9)
    for name, value in expected.values.items():
        torch.testing.assert_close(found.values[name], value, rtol=1e-9, atol=1e-11, msg=name)


def test_a_change_that_was_prepared_finds_everything_made(pool: WorkerPool) -> None:
    expected = jobs.changing(RankContext.alone(), ["mb=2"], steps=6)
    found = pool.run(jobs.changing, ["dp=2", "pp=2,mb=2", "tp=2"], 2, "adamw", True, world=2)[0]
    assert found.losses == pytest.approx(expected.losses, rel=1e-9)
    for name, value in expected.values.items():
        torch.testing.assert_close(found.values[name], value, rtol=1e-9, atol=1e-11, msg=name)


def test_what_the_loop_froze_stays_frozen_wherever_it_then_lies(pool: WorkerPool) -> None:
    expected = jobs.frozen_before_changes(RankContext.alone(), ["mb=2", "", ""])
    alone = jobs.frozen_before_changes(RankContext.alone(), ["mb=2", "mb=4", "mb=2"])
    split = pool.run(jobs.frozen_before_changes, ["pp=2,mb=2", "dp=2,zero=1", "tp=2"], world=2)[0]
    for found in (alone, split):
        assert found.losses == pytest.approx(expected.losses, rel=1e-9)
        for name, value in expected.values.items():
            torch.testing.assert_close(found.values[name], value, rtol=1e-9, atol=1e-11, msg=name)


def test_what_cannot_be_is_not_prepared() -> None:
    with opened(RankContext.alone(), net(), "mb=2", numbers(0), loss=both, has_optimizer=True) as session:
        with pytest.raises(PlanError, match="pp=2 does not divide the number of ranks: there is 1"):
            session.prepare("pp=2")
        assert not session.is_prepared
        session.prepare("mb=4")
        assert not session.change("mb=1").ready  # another one than was prepared
    session = opened(RankContext.alone(), net(), "mb=2", numbers(0), loss=both)
    with session, pytest.raises(ConfigError, match="moves the state of the session's own optimizer"):
        session.prepare("mb=4")


@pytest.mark.long
def test_muon_goes_on_where_plans_leave_matrices_whole_and_is_refused_where_owners_keep_them(pool: WorkerPool) -> None:
    expected = jobs.changing(RankContext.alone(), ["mb=2", "mb=4"], steps=3, kind="muon")
    found = pool.run(jobs.changing, ["pp=2,mb=2", "dp=2", "pp=2,mb=4"], 2, "muon", world=2)[0]
    assert found.losses == pytest.approx(expected.losses, rel=1e-9)
    for name, value in expected.values.items():
        torch.testing.assert_close(found.values[name], value, rtol=1e-9, atol=1e-11, msg=name)
    with pytest.raises(
        ChangeRefused, match=r"plan dp=2,zero=1\S* splits matrices that the optimizer updates"
    ) as refused:
        pool.run(jobs.changing, ["dp=2", "dp=2,zero=1"], 2, "muon", world=2)
    assert "go on from the checkpoint" in refused.value.hint


def test_a_change_that_cannot_be_is_refused_and_the_session_goes_on() -> None:
    with opened(RankContext.alone(), net(), "mb=2", numbers(0), loss=both, has_optimizer=True) as session:
        with pytest.raises(PlanError, match="pp=2 does not divide the number of ranks: there is 1"):
            session.change("pp=2")
        with pytest.raises(PlanError, match="keeps the optimizer's state on the host, where"):
            session.change("offload=optimizer")
        with pytest.raises(ConfigError, match="a loop of your own has no search for a plan"):
            session.change("auto")
        session.forward_backward(numbers(0))
        with pytest.raises(ConfigError, match="found gradients that no update has used"):
            session.change("mb=4")
        session.step()
        session.change("mb=4")
        assert session.plan.mb == 4 and float(session.forward_backward(numbers(1))) > 0


def test_a_change_that_is_given_up_midway_leaves_optimizer_and_scheduler_connected(pool: WorkerPool) -> None:
    """Also of sessions with another schedule."""
    expected = jobs.changing(RankContext.alone(), ["mb=2"], steps=6)
    found = pool.run(jobs.refused_midway, 2, world=2)[0]
    assert found.losses == pytest.approx(expected.losses, rel=1e-9)
    for name, value in expected.values.items():
        torch.testing.assert_close(found.values[name], value, rtol=1e-9, atol=1e-11, msg=name)


def test_what_would_leave_the_users_own_optimizer_behind_is_refused() -> None:
    session = opened(RankContext.alone(), net(), "mb=2", numbers(0), loss=both)
    with session, pytest.raises(ConfigError, match="moves the state of the session's own optimizer"):
        session.change("mb=4")


def test_batches_that_were_never_cut_are_not_cut_by_a_change() -> None:
    session = opened(RankContext.alone(), net(), "", numbers(0), loss=both, has_optimizer=True)
    with session, pytest.raises(PlanError, match="cuts batches, and whether the samples of"):
        session.change("mb=2")


def test_what_does_not_fit_is_refused_with_what_would() -> None:
    options = {"loss": both, "has_optimizer": True, "memory": "40kB"}
    with opened(RankContext.alone(), net(), "mb=8", numbers(0), **options) as session:
        with pytest.raises(ChangeRefused, match=r"plan mb=1.* does not fit") as refused:
            session.change("mb=1")
        assert "would fit" in refused.value.hint
        assert session.plan.mb == 8 and float(session.forward_backward(numbers(0))) > 0
