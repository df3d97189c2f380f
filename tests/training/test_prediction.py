"""Every step stands beside what was predicted from the run's own first steps, and the end of the run says both."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.run_helpers import records, short_run

long = pytest.mark.long
PLANS = ["mb=2", "pp=2,mb=2", pytest.param("tp=2", marks=long), pytest.param("dp=2,zero=1", marks=long)]


@pytest.mark.usefixtures("lent_ranks")
@pytest.mark.parametrize("plan", PLANS)
def test_steps_after_the_measured_ones_are_logged_beside_their_prediction(plan: str, tmp_path: Path) -> None:
    short_run("gpt2", "synthetic", tmp_path, plan=plan, steps=5, checkpoint_every=1, device="cpu", export=False)
    steps = records(tmp_path, "step")
    assert [step["step"] for step in steps if "predicted_step_seconds" in step] == [4, 5]
    [made], [end] = records(tmp_path, "prediction"), records(tmp_path, "finish")
    assert made["predicted_step_seconds"] == steps[-1]["predicted_step_seconds"] == end["predicted_step_seconds"] > 0
    assert "main memory" in made["no_memory"] and "predicted_memory_bytes" not in steps[-1]
    assert end["step_seconds"] > 0 and end["memory_bytes"] > 0


def test_a_run_too_short_to_measure_says_so_and_predicts_nothing(tmp_path: Path) -> None:
    short_run("gpt2", "synthetic", tmp_path, steps=2, device="cpu", export=False)
    [said] = records(tmp_path, "prediction")
    assert "fewer than 3 steps" in said["no_step_seconds"]
    assert not any("predicted_step_seconds" in record for record in records(tmp_path, "step"))


def test_a_resumed_run_measures_its_own_first_steps(tmp_path: Path) -> None:
    for steps, resume in ((2, "no"), (6, "auto")):
        options = {"resume": resume} if resume != "no" else {}
        short_run("gpt2", "synthetic", tmp_path, steps=steps, device="cpu", export=False, **options)
    assert [step["step"] for step in records(tmp_path, "step") if "predicted_step_seconds" in step] == [6]
