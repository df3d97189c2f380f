"""What the header of a run says about its plan and its ranks; what a loss undoes of what a run has said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx.engine.step import Outcome
from phalanx.observe.metrics import Meter
from phalanx.observe.progress import make_progress
from phalanx.observe.runlog import RunLog
from phalanx.plan.plan import Plan
from phalanx.state.snapshot import Mark, Snapshot
from phalanx.training.header import plan_text, ranks_text
from phalanx.training.reporting import Reporter, StepFacts


def test_the_ranks_are_named_by_axis() -> None:
    assert ranks_text(Plan(pp=2, dp=3), 6) == "6 (2 in a pipeline × 3 replicas)"
    assert ranks_text(Plan(pp=2, tp=2), 5) == "4 (2 in a pipeline × 1 replica × 2 tensor-parallel), 1 more to spare"


def test_the_plan_is_shown_with_what_it_makes_of_a_batch() -> None:
    assert plan_text(Plan(dp=2, mb=2, recompute=("block",)), 10) == (
        "dp=2,mb=2,recompute=block: 2 replicas × 2 × 2 to 3 of the 10 samples, schedule 1f1b, "
        "activations recomputed in the backward, a block at a time"
    )
    assert plan_text(Plan(tp=2, overlap="oases"), 8) == (
        "tp=2,overlap=oases: 1 × 8 of the 8 samples in 2 interleaved halves, schedule 1f1b, "
        "activations recomputed in the backward, a unit at a time"
    )
    assert plan_text(Plan(tp=2, overlap="halves"), 8).endswith("activations kept for the backward")
    assert plan_text(Plan.parse("recompute=block+light*2"), 8).endswith(
        "activations of 1 layer recomputed in the backward, a block at a time; "
        "of 2 layers recomputed in the backward but for products and attention; of other blocks kept for the backward"
    )


def lost(step: int, repeated: int) -> dict[str, Any]:
    """The record of a loss after which `step` is the next one."""
    return {
        "step": step, "repeated": repeated, "plan": "dp=2", "lost": ["rank 1"], "ranks": 2, "source": "",
        "seconds": 1.0, "how": "replace", "parts": {}, "bytes": 0, "generation": 1,
    }  # fmt: skip


@pytest.fixture
def told() -> list[tuple[str, int]]:
    """Hooks that were called, with the step of what they were given."""
    return []


@pytest.fixture
def reporter(tmp_path: Path, told: list[tuple[str, int]]) -> Reporter:
    """Of a run that has made seven steps."""
    snapshot = Snapshot({"max_nonfinite": 9, "spike_factor": None}, Mark("", ""), Mark("", ""), 20)
    progress, meter, device = make_progress("off", False, 1), Meter(total_steps=20, peak=None), torch.device("cpu")
    emit = lambda hook, *given: told.append((hook, given[0]["step"]))  # noqa: E731
    found = Reporter(snapshot, meter, RunLog(tmp_path, 0), progress, emit, device)
    for step in range(1, 8):
        made(found, step)
    told.clear()
    return found


def made(reporter: Reporter, step: int) -> None:
    values = torch.tensor([float(step), 1, 1, 0, 0, 10, 10, 0], dtype=torch.float64)
    reporter.step(StepFacts(step, 4 * step, 1e-3, "tokens", None), Outcome(values, None))


def test_a_run_that_is_to_end_ends_after_a_loss_unless_it_goes_back(reporter: Reporter) -> None:
    reporter.ended("asked for")
    reporter.recovered(lost(step=8, repeated=0), [], told=7)
    assert reporter.ends
    reporter.spike = 7
    reporter.recovered(lost(step=5, repeated=3), [], told=7)
    assert not reporter.ends and reporter.spike is None


def test_steps_that_were_undone_are_not_told_of_again(reporter: Reporter, told: list[tuple[str, int]]) -> None:
    undone = list(reporter.newest)
    reporter.recovered(lost(step=4, repeated=4), undone, told=3)
    made(reporter, 4)
    assert [each["step"] for each in reporter.newest] == [4]
    reporter.recovered(lost(step=5, repeated=0), list(reporter.newest), told=4)
    assert told == [("on_loss", 4), ("on_step", 4), ("on_loss", 5)]
