"""A session that changes its plan goes on as if it had never had another."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from phalanx.launch.context import RankContext
from phalanx.launch.worker_pool import WorkerPool
from tests.adapt import jobs
from tests.captured import GPT2


def require_same(found: jobs.Trained, expected: jobs.Trained) -> None:
    assert found.losses == pytest.approx(expected.losses, rel=1e-9, abs=0.0)
    assert found.values.keys() == expected.values.keys()
    for name, value in expected.values.items():
        torch.testing.assert_close(found.values[name], value, rtol=1e-7, atol=1e-10, msg=name)


def require_changes(pool: WorkerPool, name: str, plans: Sequence[str], world: int = 4) -> list[jobs.Trained]:
    """A step under each plan is a step of the one process that never changes its own."""
    expected = jobs.train(RankContext.alone(), name, ["mb=2"], len(plans))  # first: it captures for all
    found = pool.run(jobs.train, name, plans, world=world)
    require_same(found[0], expected)
    assert all(each.losses == found[0].losses for each in found)
    return found


def test_stages_replicas_and_tensor_splits_follow_each_other(pool: WorkerPool) -> None:
    plans = ["pp=4,mb=4", "dp=4", "tp=2,dp=2", "pp=2,dp=2,zero=1"]
    require_changes(pool, GPT2, plans)


def test_ranks_without_a_place_wait_and_come_back(pool: WorkerPool) -> None:
    plans = ["pp=4,mb=4", "pp=3,mb=4", "pp=1,dp=1", "dp=3,zero=3", "tp=4"]
    require_changes(pool, GPT2, plans)
