"""Published token-sliced steps: rows are read as what they are, calibration finds what made them, misses are shown."""

from __future__ import annotations

import csv
import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "benchmarks"))

import terapipe_published
import terapipe_published_page
from terapipe_model import FORMS, PLANNED, Device, Form, Run, Setting, calibrate, read

from phalanx.planning.slice_search import plan_batch, slice_seconds, step_seconds

WIDE = Setting("wide", 96, 12288, 96, 1024, tp=4, pp=96, dp=1, samples=2)
LONG = Setting("long", 40, 5120, 40, 3072, tp=8, pp=40, dp=1, samples=2)
COPIES = Setting("copies", 24, 2048, 16, 1024, tp=1, pp=24, dp=8, samples=16)
NOTES = {1: "w/o TeraPipe; setting (0)", PLANNED: "token slices=DP; setting (0)"}


def device(form: Form) -> Device:
    return Device(form, 1.2e-14, 1.2e-10, 4e-3 if form.start else 0.0, 5e-3)


def step(made_by: Device, setting: Setting, slicing: int) -> Run:
    times = made_by.times(setting)
    if slicing == PLANNED:
        seconds = plan_batch({1: times}, setting.samples, setting.pp, 8).seconds
    else:
        grains = [setting.tokens // 8 // slicing] * slicing
        seconds = step_seconds(slice_seconds(times, grains) * setting.samples, setting.pp)
    return Run(setting, slicing, seconds + setting.reduction)


def published(made_by: Device) -> list[Run]:
    wide = [step(made_by, WIDE, slicing) for slicing in (1, 4, 8, 16, 32, 64, 128, PLANNED)]
    return [*wide, *(step(made_by, setting, slicing) for setting in (LONG, COPIES) for slicing in (1, PLANNED))]


def write(path: Path, runs: list[Run], source: str = "TeraPipe (paper)") -> Path:
    with path.open("w", encoding="utf-8", newline="") as file:
        lines = csv.writer(file)
        sizes = ["layers", "hidden", "heads", "seq_len", "tp", "pp", "dp", "global_batch"]
        lines.writerow(["source", "model", *sizes, "measured_iter_s", "notes"])
        lines.writerow(["another system", "m", 1, 1, 1, 1, 1, 1, 1, 1, 1.0, "1F1B"])
        for run in runs:
            s, notes = run.setting, NOTES.get(run.slicing, f"token slices={run.slicing}; setting (0)")
            sizes = [s.layers, s.hidden, s.heads, s.tokens, s.tp, s.pp, s.dp, s.samples * s.dp]
            lines.writerow([source, s.model, *sizes, run.seconds, notes])
    return path


def test_rows_of_other_systems_are_left_out_and_slicings_are_read_from_the_notes(tmp_path: Path) -> None:
    runs = published(device(FORMS[0]))
    assert read(write(tmp_path / "runs.csv", runs, "zhuohan123/terapipe flop_model.py")) == runs


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_calibration_finds_the_device_behind_the_steps(form: Form) -> None:
    found = calibrate(published(device(form)), form)
    for name in ("per_flop", "per_pair", "start", "floor"):
        assert getattr(found, name) == pytest.approx(getattr(device(form), name), rel=1e-6)


def test_steps_that_do_not_calibrate_are_simulated_without_a_look_at_them() -> None:
    runs = published(device(FORMS[0]))
    other = [run if run.calibrates else Run(run.setting, run.slicing, 2 * run.seconds) for run in runs]
    setting, results = terapipe_published.compare(other)
    assert terapipe_published.held_out(results) == pytest.approx([-0.5] * 8, rel=1e-6)
    assert setting["forms"][0]["held_out_median"] == pytest.approx(0.5)
    assert setting["forms"][0]["calibration_error"] < 1e-6


def test_slicings_in_another_order_than_published_are_found() -> None:
    runs = published(device(FORMS[0]))
    assert not terapipe_published.swapped(terapipe_published.simulate(device(FORMS[0]), WIDE, runs))
    slower = [Run(run.setting, run.slicing, 9.0) if run.slicing == 16 else run for run in runs]
    pairs = terapipe_published.swapped(terapipe_published.simulate(device(FORMS[0]), WIDE, slower))
    assert pairs and all(16 in pair for pair in pairs)


def test_no_uniform_slicing_is_faster_than_the_planned_one() -> None:
    _, results = terapipe_published.compare(published(device(FORMS[0])))
    for result in results:
        seconds = {step["slices"]: step["simulated"] for step in result["steps"]}
        assert seconds[PLANNED] <= min(seconds.values()) * (1 + 1e-9)


def test_a_table_and_a_page_come_from_a_csv(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "runs.csv", published(device(FORMS[0])))
    terapipe_published.main([str(path), "--out", str(tmp_path / "terapipe_published.json")])
    assert "planned" in capsys.readouterr().out
    page = terapipe_published_page.page(tmp_path)
    assert "**the same order**; 3 of these 8 were calibrated on" in page
    assert re.search(r"Speed-ups are off by [-+]0 % to [-+]0 %\.", page)


def test_a_missing_csv_is_an_error_that_says_what_to_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        terapipe_published.main([str(tmp_path / "none.csv")])
    assert "none.csv; name a CSV of published runs (--help says which columns it needs)" in capsys.readouterr().err


def test_a_csv_without_the_rows_to_calibrate_on_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "runs.csv", [])
    with pytest.raises(SystemExit):
        terapipe_published.main([str(path)])
    assert "has no TeraPipe rows without slices and with 128 slices to calibrate on" in capsys.readouterr().err
