"""Our own runs: what is compared with what, and a whole comparison of two plans of a tiny model."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "benchmarks"))

import own_runs
import own_runs_page
from compare_setting import Setting, Size
from foresight import joined
from own_choice import CHOSEN, planned, with_chosen
from own_runs import PLANS, choice, compared, error, regret, rows, summary
from own_runs_rank import Task, measure, samples_of, whole

from phalanx.comm.links import Links
from phalanx.launch.context import RankContext
from phalanx.launch.worker_pool import WorkerPool
from phalanx.plan.plan import Plan
from phalanx.predict.contention import Speeds, Work
from phalanx.profile import beside
from phalanx.profile.beside import Seen


def result(plan: str, predicted: float, measured: float) -> dict[str, Any]:
    times = {"median": measured, "low": measured, "high": measured, "repeats": 3}
    return {"ranks": "r", "plan": plan, "predicted_seconds": predicted, "planned_seconds": 5 - predicted,
            "measured_seconds": times, "spread": 0.01, "full": "dp=2"}  # fmt: skip


RESULTS = [result("a", 1.0, 1.25), result("b", 2.0, 1.0), result("c", 3.0, 3.0)]


def test_errors_and_regret_are_relative_to_what_was_measured() -> None:
    assert [round(error(own), 3) for own in RESULTS] == [-0.2, 1.0, 0.0]
    assert regret(RESULTS, 1) == pytest.approx(0.25) and regret(RESULTS, 2) == 0
    assert summary(RESULTS).startswith("3 plans: mean error 40.0%, worst +100.0% (b)")
    assert rows(RESULTS)[0] == ["r", "a", "1000.0", "1250.0", "±1.0%", "-20.0%", "4000.0"]


def test_what_train_would_choose_is_told_beside_what_its_planning_says_of_all() -> None:
    assert choice(RESULTS) == ""
    told = choice([*RESULTS, result(CHOSEN, 1.5, 1.1)])
    assert told.startswith("`phalanx train` without a plan takes dp=2: 10.0% slower than the fastest.")
    assert told.endswith("puts first is 200.0% slower, the best of its first three 0.0%")


def test_there_are_enough_plans_and_each_is_another_one() -> None:
    assert len(set(PLANS)) == len(PLANS) >= 24


def test_plans_share_segments_where_they_compute_the_same() -> None:
    one, other = Plan.parse("pp=2,tp=2,mb=4,stages=3-3"), Plan.parse("tp=2,dp=2,mb=2,stages=6,zero=1")
    assert whole(one, 6) == whole(other, 6) != whole(Plan.parse("dp=4,stages=6"), 6)
    assert samples_of(one, 16) == samples_of(other, 16) == 4


def test_passes_are_joined_by_their_medians() -> None:
    key = (Work.COMPUTE, Work.COMPUTE)
    passes = [
        Seen({("send", 2): ((8.0, seconds),)}, {key: (seconds / 4,)}, seconds, 2 * seconds, {4: seconds})
        for seconds in (1.0, 3.0, 2.0)
    ]
    assert joined(passes) == Seen({("send", 2): ((8.0, 2.0),)}, {key: (0.5,)}, 2.0, 4.0, {4: 2.0})


def test_the_page_says_how_it_was_measured(tmp_path: Path) -> None:
    setting = {"ranks": "4 nodes, 1gbit", "device": "cpu", "dtype": "float32", "passes": 2,
               "size": {"layers": 2, "width": 64, "samples": 8, "tokens": 16},
               "profile": {"beside": {"compute beside compute": [0.5]}, "start": 1e-3,
                           "meeting": {"4": 5e-3}}}  # fmt: skip
    machine = {"gpus": [], "processor": "x", "torch": "2", "date": "today", "cores": 2, "load": 0.0}
    data = {"machine": machine, "setting": setting, "results": RESULTS}
    (tmp_path / "own_runs_link.json").write_text(json.dumps(data))
    page = own_runs_page.page(tmp_path)
    assert "own_runs.py --link 1gbit --passes 2" in page and "| a | 1000.0 | 1250.0 | ±1.0% | -20.0% | 4000.0 |" in page
    assert "compute beside compute 50%" in page and "3 plans: mean error" in page
    assert "A sum takes 1.0 ms of a rank's own time to start; lost at one: 5.0 ms of 4 ranks." in page


def ranks_listen(context: RankContext) -> tuple[Speeds, Speeds]:
    links = Links(context)
    ranks = beside.Together(links)
    found = beside.listening(ranks, lambda: time.sleep(0.002)), beside.transferring(ranks, 1024)
    links.close()
    return found


def test_ranks_measure_what_waiting_for_messages_and_crowded_links_cost(pool: WorkerPool) -> None:
    """All messages that were held back have come, so that the links can be closed; more listeners never help."""
    listening, transferring = pool.run(ranks_listen, world=2)[0]
    assert len(listening) == 4 * 2 and all(0 < speed <= 1 for speed in listening)
    assert len(transferring) == 2 * (2 * 2 - 1) and all(0 < speed <= 1 for speed in transferring)
    assert all(list(speeds) == sorted(speeds, reverse=True) for speeds in (listening, transferring))


@pytest.mark.long
def test_plans_are_predicted_and_measured(pool: WorkerPool) -> None:
    setting = Setting("llama", Size(4, 64, 128, samples=16, tokens=16), "float32", masters=True)
    captured = setting.capture()
    plans = {text: Plan.parse(text) for text in ("tp=2,dp=2,stages=6", "pp=4,mb=4,stages=2-1-1-2,schedule=zb-h1")}
    task = Task(setting, plans, 2, "cpu", (1024, 65536))
    found = pool.run(planned, task, captured, world=own_runs.WORLD)
    plans, own = with_chosen(task, found)
    task = replace(task, plans=plans)
    seen = pool.run(measure, task, captured, world=own_runs.WORLD)
    results = compared("here", task, captured, seen, own, is_apart=False)
    assert [own["plan"] for own in results] == list(plans) and list(plans)[-1] == CHOSEN
    assert all(own["planned_seconds"] > 0 for own in results) and "by measured rates and measured blocks" in own.why
    assert all(own["predicted_seconds"] > 0 and own["measured_seconds"]["repeats"] == 2 for own in results)
