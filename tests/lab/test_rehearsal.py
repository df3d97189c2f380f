"""Timed labs: `phalanx train` in a lab with more ranks than cores waits where it would compute, and says so."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from phalanx.errors import PlanError
from phalanx.lab.rehearsal import measure, rehearse
from phalanx.lab.run import Lab
from phalanx.lab.spec import TIMED
from phalanx.program.instructions import Op
from tests import captured
from tests.run_helpers import short_run

TRAIN = [
    "phalanx",
    "train",
    "--model",
    "gpt2",
    "--tiny",
    "--data",
    "synthetic",
    "--steps",
    "3",
    "--batch-size",
    "8",
    "--seq-len",
    "32",
]


def timed(plan: str, **options: object) -> captured.Session:
    case = captured.named(captured.GPT2)
    session = case.session(plan, **options)
    rehearse(session.step, session.evaluation, session.connected.world, case.batch, 0)
    return session


@pytest.mark.parametrize(("plan", "ops"), [("mb=2", {Op.F, Op.BW}), ("mb=2,schedule=zb-h1", {Op.F, Op.B, Op.W})])
def test_every_block_is_measured_in_what_it_does(plan: str, ops: set[Op]) -> None:
    case = captured.named(captured.GPT2)
    found = measure(case.session(plan).step, case.batch, 0)
    assert {op for op, seconds in found.items() if all(s > 0 for s in seconds)} == ops
    assert not any(any(seconds) for op, seconds in found.items() if op not in ops)


def test_a_timed_step_learns_nothing() -> None:
    session = timed("mb=2")
    case = captured.named(captured.GPT2)
    before = {name: weight.copy.clone() for name, weight in session.state.parameters.trained.items()}
    session.step(case.batch, 0, 1e-3).read()
    assert all(weight.copy.equal(before[name]) for name, weight in session.state.parameters.trained.items())


@pytest.mark.long
@pytest.mark.parametrize("plan", ["pp=2,mb=4,dp=2", "tp=4,overlap=oases"])
def test_more_ranks_than_cores_train_in_a_timed_lab(plan: str, tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    with Lab("ranks=4,device=cpu:1thread,compute=timed", logs=tmp_path / "logs") as lab:
        assert lab.run([*TRAIN, "--plan", plan, "--out", str(tmp_path / "run")]) == 0
        assert not any("slow each other down" in note for note in lab.notes)
    shown = "".join(capfd.readouterr())
    assert "compute=timed" in shown and "losses and weights mean nothing" in re.sub(r"\s+", " ", shown)


def test_slices_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a training that is told to wait, as a lab tells it."""
    monkeypatch.setenv(TIMED, "yes")
    with pytest.raises(PlanError) as caught:
        short_run("gpt2", "synthetic", tmp_path, device="cpu", export=False, plan="mb=2,slices=2")
    assert caught.value.message == "lab: compute=timed knows one time for every block, and slices take different times"
    assert caught.value.hint == "leave slices out, or compute=timed"


def test_only_training_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PHALANX_TIMED", raising=False)
    with Lab("ranks=1") as lab, Lab("ranks=1,compute=timed") as waits:
        code = "import os, sys; sys.exit('PHALANX_TIMED' in os.environ)"
        assert lab.run(["python3", "-c", code]) == 0 and waits.run(["python3", "-c", code]) == 1
    assert "PHALANX_TIMED" not in os.environ
