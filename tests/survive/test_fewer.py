"""Ranks that are left go on with the plan that is predicted to be quickest, and train what they would have trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from phalanx.launch.context import RankContext
from phalanx.launch.worker_pool import WorkerPool
from phalanx.planning.cluster import Cluster
from phalanx.planning.cost import Software
from phalanx.training import standby
from phalanx.training.prediction import Predictor
from phalanx.training.trainer import fit_on_rank
from tests.run_helpers import records, short_run
from tests.survive.runs import DATA, OPTIONS, Strike, fit, in_step, losses_of_ranks, require_same_run

STEPS = 12


def _over_slow_links(context: RankContext, payload: Any) -> Any:
    """As far as ranks know: their own steps saw the links of this machine, which are fast."""
    node = {"count": context.world, "device": "slow", "flops": "1e9", "bandwidth": "1GB/s", "memory": "8GB"}
    slow = Cluster.take({"nodes": [{**node, "link": "1GB/s", "network": "10Mb/s"}]}), Software()
    unseen = property(lambda _: None, lambda *_: None)
    with patch.object(standby, "planned_here", lambda *_: slow), patch.object(Predictor, "seen", unseen):
        return fit_on_rank(context, payload)


def _that_cannot_be_judged(context: RankContext, payload: Any) -> Any:
    def fails(*_: Any) -> Any:
        raise ValueError("nothing is known of this model")

    with patch.object(standby, "whole_model", fails):
        return fit_on_rank(context, payload)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("alone")
    short_run("gpt2", DATA, out, **{**OPTIONS, "steps": STEPS})
    return out


def test_a_pipeline_goes_on_as_a_pipeline_where_links_are_slow(pool: WorkerPool, tmp_path: Path, alone: Path) -> None:
    """And each stage that was not lost with it keeps most of what it has."""
    options = {"plan": "pp=3,mb=4", "mirror_every": 1, "steps": STEPS}
    strikes = [Strike(1, in_step(8, "F"))]
    fit(pool, tmp_path, 3, "shrink", strikes=strikes, target=_over_slow_links, **options)
    require_same_run(tmp_path, alone)
    (loss,) = losses_of_ranks(tmp_path)
    assert (loss["ranks"], loss["plan"]) == (2, "pp=2,mb=4")
    assert loss["chosen"].startswith("predicted ") and " a step, dp=2,mb=2 " in loss["chosen"]
    times = [own["step_seconds"] for own in loss["predicted"]]
    assert loss["predicted"][0]["plan"] == "pp=2,mb=4" and times[0] < times[1]
    two, one = records(tmp_path, "standby")[:2]
    assert (two["ranks"], two["plan"], one["ranks"]) == (2, "pp=2,mb=4", 1)
    assert "pp=2,mb=4" in [own["plan"] for own in records(tmp_path, "ahead")]  # its functions were there


@pytest.mark.long
def test_what_cannot_be_judged_goes_on_as_ever(pool: WorkerPool, tmp_path: Path, alone: Path) -> None:
    strikes = [Strike(2, in_step(8, "BW"))]
    options = {"plan": "dp=3", "steps": STEPS}
    fit(pool, tmp_path, 3, "shrink", strikes=strikes, target=_that_cannot_be_judged, **options)
    require_same_run(tmp_path, alone)
    (loss,) = losses_of_ranks(tmp_path)
    assert loss["plan"].startswith("dp=2")
    assert loss["chosen"] == "not by its seconds: ValueError: nothing is known of this model"


@pytest.mark.long
def test_a_second_loss_soon_after_the_first_finds_its_plan_in_order(
    pool: WorkerPool, tmp_path: Path, alone: Path
) -> None:
    """Before the ranks that were left had measured steps of theirs: by what was known before."""
    strikes = [Strike(1, in_step(8, "F")), Strike(3, in_step(9, "F"))]
    options = {"plan": "pp=4,mb=4", "mirror_every": 1, "steps": STEPS}
    fit(pool, tmp_path, 4, "shrink", strikes=strikes, target=_over_slow_links, **options)
    require_same_run(tmp_path, alone)
    first, second = losses_of_ranks(tmp_path)
    assert (first["plan"], second["plan"]) == ("pp=3,mb=4", "pp=2,mb=4")
    assert second["chosen"].startswith("predicted ")
