"""Two machines, each with a supervisor of its own: one is lost, and comes back (network namespaces of a lab)."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from phalanx.lab.run import Lab
from phalanx.lab.session import Session
from phalanx.launch.succession import Claim
from phalanx.training.trainer import Trainer
from tests.lab.labs import needs_namespaces
from tests.run_helpers import records
from tests.survive.runs import ledger, require_same_run
from tests.survive.spread_run import STEPS, Patient, config

pytestmark = [needs_namespaces, pytest.mark.long]


def wait_until(condition: Callable[[], Any], session: Session, what: str, seconds: float = 300.0) -> None:
    """As long as a command runs that is to run."""
    deadline = time.monotonic() + seconds
    while not condition():
        said = [rank.last_output() for rank in session.ranks]
        runs = all(rank.running or rank.ended for rank in session.ranks)
        assert runs and time.monotonic() < deadline, f"{what}: {said}"
        time.sleep(0.1)


def of_kind(out: Path, kind: str) -> list[dict[str, Any]]:
    return records(out, kind) if (out / "log-rank0.jsonl").exists() else []


@pytest.mark.parametrize("when", ["state", "step"])
def test_a_plan_for_which_a_rank_of_any_node_lacks_memory_gives_way_to_another(
    when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both nodes' supervisors begin anew; whichever node the rank is on."""
    out, release = tmp_path / "run", tmp_path / "release"
    release.touch()
    monkeypatch.setenv("TEST_GREEDY", f"{tmp_path},{when},2")
    command = [sys.executable, "-m", "tests.survive.spread_run", str(out), str(release), "shrink", "auto", "never"]
    with Lab("nodes=2,device=cpu:1thread", logs=tmp_path / "logs") as lab, lab.start(command) as session:
        for rank in session.ranks:
            assert rank.process.wait(300) == 0, rank.last_output()
    chosen = of_kind(out, "plan")[-1]
    assert len(chosen["did_not_fit"]) in (1, 2)  # both ranks may lack it in the same attempt
    assert chosen["plan"] not in chosen["did_not_fit"]
    given = {"plan": "simple", "optimizer": "tests.run_helpers.NoDecay", "steps": 4}
    Trainer("gpt2", Patient(release), config(tmp_path / "alone", **given)).fit()
    require_same_run(out, tmp_path / "alone")


@pytest.mark.parametrize(
    ("world", "node", "on_loss", "plan", "every", "claimed"),
    [
        (2, 1, "shrink", "dp=2", "never", False), (2, 1, "regrow", "dp=2", "never", False),
        (2, 1, "shrink", "pp=2,mb=2", "0", False), (2, 0, "shrink", "pp=2,mb=2", "0", False),
        (2, 0, "regrow", "dp=2", "never", False), (3, 0, "shrink", "pp=3,mb=2", "0", False),
        (3, 0, "shrink", "pp=3,mb=2", "0", True),
    ],
)  # fmt: skip
def test_a_node_is_lost_and_the_others_go_on(
    world: int, node: int, on_loss: str, plan: str, every: str, claimed: bool, tmp_path: Path
) -> None:
    """With mirrors where it alone held something. Node 0's supervisor leads and has the store: without it another's
    does. claimed: it had claimed a term that the others did not hear of, since it ended."""
    out, release = tmp_path / "run", tmp_path / "release"
    command = [sys.executable, "-m", "tests.survive.spread_run", str(out), str(release), on_loss, plan, every]
    with Lab(f"nodes={world},device=cpu:1thread", logs=tmp_path / "logs") as lab, lab.start(command) as session:
        wait_until(lambda: len(of_kind(out, "step")) >= 2, session, "no step")
        if claimed:
            claim = Claim(1, 0, 7, "127.0.0.1", 1, "run", "token")  # nobody is at that port
            (out / ".leader-1").write_text(json.dumps(dataclasses.asdict(claim)))
        session.ranks[node].end()
        wait_until(lambda: of_kind(out, "loss"), session, "the loss was not told")
        if on_loss == "regrow":
            session.ranks[node] = session._start_rank(node, world, node, 0)
            wait_until(lambda: len(of_kind(out, "loss")) == 2, session, "the node was not taken in")
        release.touch()
        for rank in (rank for rank in session.ranks if not rank.ended):
            assert rank.process.wait(300) == 0, rank.last_output()
    lost, *came = of_kind(out, "loss")
    how = "whose supervisor ended," if node else "whose supervisor led the run,"
    assert (lost["ranks"], lost["repeated"]) == (world - 1, 0)
    assert f"was lost with node {node}, {how}" in lost["lost"][0]
    assert (f"; of rank {node} from the mirror on rank" in lost["source"]) == (every == "0")
    assert [(each["ranks"], each["plan"]) for each in came] == ([(2, "dp=2")] if on_loss == "regrow" else [])
    Trainer("gpt2", Patient(release), config(tmp_path / "alone", plan="mb=2")).fit()
    require_same_run(out, tmp_path / "alone")
    assert [step for step, *_ in ledger(out)] == list(range(1, STEPS + 1))


@pytest.mark.parametrize("on_loss", ["replace", "shrink"])
def test_too_few_ranks_wait_for_a_lost_node_to_come_back(
    on_loss: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out, release = tmp_path / "run", tmp_path / "release"
    command = [sys.executable, "-m", "tests.survive.spread_run", str(out), str(release), on_loss, "dp=2", "never", "2"]
    with Lab("nodes=2,device=cpu:1thread", logs=tmp_path / "logs") as lab, lab.start(command) as session:
        wait_until(lambda: len(of_kind(out, "step")) >= 2, session, "no step")
        session.ranks[1].end()
        said = "fewer ranks are left than min_ranks: they keep what they have and wait for others"
        wait_until(lambda: said in capfd.readouterr().err, session, "it was not said that ranks wait")
        steps = len(of_kind(out, "step"))
        time.sleep(8.0)  # longer than the silence, and than broken connections are waited for
        assert len(of_kind(out, "step")) == steps and not of_kind(out, "loss")
        session.ranks[1] = session._start_rank(1, 2, 1, 0)
        wait_until(lambda: of_kind(out, "loss"), session, "the node was not taken in")
        release.touch()
        for rank in (rank for rank in session.ranks if not rank.ended):
            assert rank.process.wait(300) == 0, rank.last_output()
    (loss,) = of_kind(out, "loss")
    assert (loss["ranks"], loss["plan"], loss["repeated"]) == (2, "dp=2", 0)
    assert "was lost with node 1, whose supervisor ended," in loss["lost"][0]
    assert loss["lost"][1:] == ["a process came to be rank 1"]
    Trainer("gpt2", Patient(release), config(tmp_path / "alone", plan="mb=2")).fit()
    require_same_run(out, tmp_path / "alone")
