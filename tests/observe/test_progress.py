from __future__ import annotations

import io
import json
import math
import os
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.observe.progress import (
    JsonProgress,
    LiveProgress,
    PlainProgress,
    SilentProgress,
    SmoothedLoss,
    make_progress,
)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def record(step: int, **changes: Any) -> dict[str, Any]:
    values = {
        "step": step,
        "loss": 2.0,
        "lr": 1e-3,
        "grad_norm": 0.5,
        "tokens": 2048,
        "step_seconds": 0.1,
        "tokens_per_second": 20480.0,
        "flops_per_second": 4.5e10,
        "mfu": None,
        "memory_bytes": 3 << 29,
        "eta_seconds": 75.0,
        "skipped": False,
    }
    return values | changes


def show(mode: str, stream: io.StringIO, steps: list[dict[str, Any]], total: int, **options: Any) -> str:
    progress = make_progress(mode, stream=stream, **options)
    progress.start({"model": "phalanx-demo [3M]"}, total, options.get("first_step", 0))
    for step in steps:
        progress.step(step)
    progress.message("saved [here]")
    progress.finish({"tokens_per_second": 20480.0})
    progress.close()
    return stream.getvalue()


def test_auto_is_live_on_a_terminal_and_plain_elsewhere(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TERM", "xterm")
    assert isinstance(make_progress("auto", stream=Terminal()), LiveProgress)
    assert isinstance(make_progress("auto", stream=io.StringIO()), PlainProgress)
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(make_progress("auto", stream=Terminal()), PlainProgress)


def test_json_wins_over_the_mode_and_off_is_silent():
    assert isinstance(make_progress("rich", json=True, stream=Terminal()), JsonProgress)
    assert isinstance(make_progress("off"), SilentProgress)
    assert show("off", io.StringIO(), [record(1)], 1) == ""


def test_the_default_stream_is_standard_output(capsys: pytest.CaptureFixture[str]):
    make_progress("plain").message("hello")
    assert capsys.readouterr().out == "hello\n"


def test_plain_shows_the_first_the_last_and_every_nth_step():
    shown = show("plain", io.StringIO(), [record(step) for step in range(1, 26)], 25, log_every=10)
    steps = [line.split()[1] for line in shown.splitlines() if line.startswith("step ")]
    assert steps == ["1/25", "10/25", "20/25", "25/25"]


def test_plain_shows_every_number_of_a_step():
    shown = show("plain", io.StringIO(), [record(1)], 5)
    assert shown.splitlines() == [
        "model  phalanx-demo [3M]",
        "step 1/5  loss 2.0000 (smoothed 2.0000)  lr 1.00e-03  grad 0.5  20.5k tokens/s  45.0 GFLOP/s  1.5 GiB  "
        "eta 1:15",
        "saved [here]",
        "tokens per second  20.5k",
    ]


def test_mfu_replaces_flops_where_it_is_known():
    shown = show("plain", io.StringIO(), [record(1, mfu=0.537)], 5)
    assert "MFU 53.7%" in shown and "FLOP/s" not in shown


def test_skipped_and_evaluated_steps_are_always_shown():
    steps = [record(1), record(2, skipped=True, grad_norm=math.inf), record(3), record(4, eval_loss=1.5)]
    shown = show("plain", io.StringIO(), steps, 9, log_every=100)
    lines = [line for line in shown.splitlines() if line.startswith("step ")]
    assert [line.split()[1] for line in lines] == ["1/9", "2/9", "4/9"]
    assert "SKIPPED: gradients are not finite" in lines[1] and "eval 1.5000" in lines[2]


def test_metrics_that_were_asked_for_stand_beside_the_evaluated_loss():
    evaluated = record(1, eval_loss=1.5, eval_perplexity=4.48, eval_accuracy=0.25)
    assert "eval 1.5000  accuracy 0.25  lr " in show("plain", io.StringIO(), [evaluated], 9)


def test_a_spike_is_not_told_as_gradients_that_are_not_finite():
    shown = show("plain", io.StringIO(), [record(1, skipped=True, spike=True)], 9)
    assert "SKIPPED: a spike" in shown and "not finite" not in shown


def test_a_resumed_run_shows_its_own_first_step():
    progress = make_progress("plain", log_every=100, stream=(stream := io.StringIO()))
    progress.start({}, 50, first_step=20)
    progress.step(record(21))
    assert stream.getvalue().startswith("step 21/50 ")


def test_json_prints_one_object_per_event_and_nothing_else():
    shown = show("auto", io.StringIO(), [record(1), record(2, loss=math.nan)], 2, json=True)
    events = [json.loads(line, parse_constant=pytest.fail) for line in shown.splitlines()]
    assert [event["kind"] for event in events] == ["start", "step", "step", "message", "finish"]
    assert events[0] == {"kind": "start", "model": "phalanx-demo [3M]", "total_steps": 2, "first_step": 0}
    assert events[1] == {"kind": "step"} | record(1)
    assert events[2]["loss"] == "NaN"
    assert events[3]["text"] == "saved [here]"
    assert events[4]["tokens_per_second"] == 20480.0


def test_the_live_display_shows_bar_numbers_messages_and_summary(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "160")
    shown = show("rich", Terminal(), [record(1), record(2, skipped=True), record(3, eval_loss=1.5)], 3)
    for part in ("phalanx-demo [3M]", "3/3", "smoothed 2.0000", "20.5k tokens/s", "45.0 GFLOP/s", "eta 1:15"):
        assert part in shown
    assert "saved [here]" in shown and "tokens per second" in shown
    assert "SKIPPED: gradients are not finite" in shown and "eval 1.5000" in shown
    assert shown.count("\x1b[?25l") == shown.count("\x1b[?25h") == 1, "the cursor is hidden once and given back"


def test_close_gives_the_terminal_back_after_an_error():
    stream = Terminal()
    progress = make_progress("rich", stream=stream)
    progress.start({}, 3)
    progress.step(record(1))
    progress.close()
    progress.close()
    assert stream.getvalue().count("\x1b[?25h") == 1


@given(st.lists(st.floats(-1e3, 1e3), min_size=1))
def test_the_smoothed_loss_stays_between_its_extremes(losses: list[float]):
    smooth = SmoothedLoss()
    average = [smooth.add({"loss": loss}) for loss in losses][-1]
    assert min(losses) - 1e-6 <= average <= max(losses) + 1e-6


def test_the_smoothed_loss_starts_at_the_first_loss_and_follows():
    smooth = SmoothedLoss(decay=0.5)
    assert smooth.add({"loss": 4.0}) == 4.0
    assert smooth.add({"loss": 1.0}) == pytest.approx(2.0)


def test_skipped_and_non_finite_losses_are_not_smoothed():
    smooth = SmoothedLoss()
    assert math.isnan(smooth.add({"loss": math.nan}))
    assert smooth.add({"loss": 2.0}) == 2.0
    assert smooth.add({"loss": 9.0, "skipped": True}) == 2.0
    assert smooth.add({"loss": math.inf}) == 2.0


def test_the_end_says_what_was_measured_and_what_was_predicted() -> None:
    stream = io.StringIO()
    values = {"step_seconds": 0.258, "predicted_step_seconds": 0.251, "memory_bytes": 3 << 30, "loss": 2.5}
    make_progress("plain", stream=stream).finish(values)
    assert [line.split("  ", 1)[1].strip() for line in stream.getvalue().splitlines()] == [
        "258ms, predicted 251ms", "3.0 GiB", "2.5",
    ]  # fmt: skip


def test_a_reader_that_leaves_ends_the_display_and_not_the_run():
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as stream:
        progress = make_progress("plain", log_every=1, stream=stream)
        progress.message("heard")
        assert os.read(reading, 100) == b"heard\n"
        os.close(reading)
        for _ in range(3):
            progress.message("into the void")
