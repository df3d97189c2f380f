"""`phalanx inspect --slices`: what it shows, in words and as JSON, and what it says of options that cannot act."""

from __future__ import annotations

import json

import numpy as np
import pytest

from phalanx.cli import inspect_slices
from phalanx.cli.inspect_slices import Found, fit_lines, recommendation
from phalanx.cli.main import main
from phalanx.planning.slice_search import ModelledTimes
from phalanx.profile.slice_fit import report

TIMES = ModelledTimes(start=1e-4, per_token=4e-5, per_pair=2e-8, smallest=40)


def seconds(tokens: int, past: int) -> float:
    return float(TIMES.seconds(np.array([tokens], float), np.array([past], float))[0])


def found(stages: int = 4, alone: bool = False) -> Found:
    two = None if alone else lambda tokens, past: 2 * seconds(tokens, past)
    return Found("layers.0", "cpu", stages, report(seconds, two, 512, stages))


def error_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["inspect", *arguments]) == 2
    return " ".join(capsys.readouterr().err.split())


def test_a_tiny_model_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--tiny", "--slices", "--stages", "3", "--seq-len", "32", "--dtype", "float32", "--device", "cpu"]
    assert main(["inspect", "gpt2", *options, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)["slices"]
    assert (data["block"], data["device"], data["tokens"], data["stages"]) == ("transformer.h.0", "cpu", 32, 3)
    assert {(8, 0), (8, 24), (32, 0)} <= {(m["tokens"], m["past"]) for m in data["measurements"]}
    assert all(m["seconds"] > 0 for m in data["measurements"])
    assert data["fit_of_two"] is not None and 8 <= data["fit"]["smallest"] <= 32
    assert data["recommended"] == next(depth["plan"] for depth in data["depths"] if depth["stages"] == 3)


def test_the_report_shows_times_fit_and_what_to_use(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inspect_slices, "find_slices", lambda *_: found())
    assert main(["inspect", "gpt2", "--slices"]) == 0
    shown = capsys.readouterr().out
    assert "ms of a slice of layers.0 on cpu, forward and backward" in shown
    rows = [line.split() for line in shown.splitlines()]
    assert ["512", *[f"{seconds(512, 0) * 1e3:.3f}"] * 2] in rows  # all that fits is no past
    assert ["64", *(f"{seconds(64, past) * 1e3:.3f}" for past in (0, 128, 256, 448))] in rows
    assert "smallest efficient slice: 40 tokens" in shown and "with two layers in a stage: 40 tokens" in shown
    assert shown.rstrip().endswith(f"pp=4,{found().report.depth(4).text}")


def test_a_model_with_one_layer_says_nothing_of_two() -> None:
    assert not any("two layers" in line for line in fit_lines(found(alone=True).report))


def test_where_slices_do_not_help_they_are_not_recommended() -> None:
    assert recommendation(found(stages=1)).startswith("for 1 stages: leave slices out")


@pytest.mark.parametrize(("option", "value"), [("stages", "8"), ("device", "cpu")])
def test_options_for_slices_do_nothing_alone(capsys: pytest.CaptureFixture[str], option: str, value: str) -> None:
    shown = error_of(capsys, "gpt2", f"--{option}", value)
    assert (
        f"option {option} =" in shown and f"does nothing without --slices → add --slices or leave {option} out" in shown
    )


def test_slices_and_tensor_parallelism_are_not_measured_together(capsys: pytest.CaptureFixture[str]) -> None:
    assert "option tp = 2 does nothing with --slices" in error_of(capsys, "gpt2", "--slices", "--tp", "2")


def test_a_device_that_does_not_exist_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    shown = error_of(capsys, "gpt2", "--slices", "--device", "gpu")
    assert "option device = 'gpu' is not one of auto, cpu, cuda" in shown


def test_a_model_without_tokens_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    shown = error_of(capsys, "google/vit-base-patch16-224-in21k", "--slices")
    assert "option slices cuts tokens, and the inputs of" in shown and "leave --slices out" in shown


def test_a_model_whose_tokens_see_later_ones_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    shown = error_of(capsys, "google-bert/bert-base-cased", "--slices", "--tiny", "--seq-len", "32")
    assert "slices need causal attention" in shown
