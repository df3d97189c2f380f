"""Two machines, each with a supervisor of its own: one is lost, and comes back (network namespaces of a lab)."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from phalanx.lab.run import Lab
from phalanx.lab.session import Session
from phalanx.training.trainer import Trainer
from tests.lab.labs import needs_namespaces
from tests.run_helpers import records
from tests.survive.runs import ledger, require_same_run
from tests.survive.spread_run import Patient, config

pytestmark = [needs_namespaces, pytest.mark.long]


def wait_until(condition: Callable[[], Any], session: Session, what: str, seconds: float = 150.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        said = [rank.last_output() for rank in session.ranks]
        assert session.ranks[0].running and time.monotonic() < deadline, f"{what}: {said}"
        time.sleep(0.1)


def of_kind(out: Path, kind: str) -> list[dict[str, Any]]:
    return records(out, kind) if (out / "log-rank0.jsonl").exists() else []


@pytest.mark.parametrize(
    ("on_loss", "plan", "every"),
    [("shrink", "dp=2", "never"), ("regrow", "dp=2", "never"), ("shrink", "pp=2,mb=2", "0")],
)
def test_a_node_is_lost_and_the_other_goes_on(on_loss: str, plan: str, every: str, tmp_path: Path) -> None:
    """In the last case what it alone held is mirrored on the other."""
    out, release = tmp_path / "run", tmp_path / "release"
    command = [sys.executable, "-m", "tests.survive.spread_run", str(out), str(release), on_loss, plan, every]
    with Lab("nodes=2,device=cpu:1thread", logs=tmp_path / "logs") as lab, lab.start(command) as session:
        wait_until(lambda: len(of_kind(out, "step")) >= 2, session, "no step")
        session.ranks[1].end()
        wait_until(lambda: of_kind(out, "loss"), session, "the loss was not told")
        if on_loss == "regrow":
            session.ranks[1] = session._start_rank(1, 2, 1, 0)
            wait_until(lambda: len(of_kind(out, "loss")) == 2, session, "the node was not taken in")
        release.touch()
        assert session.ranks[0].process.wait(120) == 0
        if on_loss == "regrow":
            assert session.ranks[1].process.wait(60) == 0, session.ranks[1].last_output()
    lost, *came = of_kind(out, "loss")
    # A stage may be missed before its machine is: both are waited for equally long.
    words = ("was lost with node 1", *(["rank 1 (stage 1) stopped answering"] if every == "0" else []))
    assert lost["ranks"] == 1 and any(each in lost["lost"][0] for each in words) and lost["repeated"] == 0
    assert ("; of rank 1 from the mirror on rank 0" in lost["source"]) == (every == "0")
    assert [(each["ranks"], each["plan"]) for each in came] == ([(2, "dp=2")] if on_loss == "regrow" else [])
    Trainer("gpt2", Patient(release), config(tmp_path / "alone", plan="mb=2")).fit()
    require_same_run(out, tmp_path / "alone")
    assert [step for step, *_ in ledger(out)] == list(range(1, 13))
