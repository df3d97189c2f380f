"""The soak: what its numbers mean, and what its table and page say of results."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "benchmarks"))

import report
import soak
import soak_page
import soak_runs


def record(number: int, outcome: str, recoveries: list[float], problem: str = "") -> dict[str, Any]:
    setting = soak_runs.Setting.of(number, ["kill", "raise"])
    return soak_runs._record(setting, outcome, problem, 3.0, recoveries, [])


def test_a_number_always_means_the_same_run_and_every_kind_has_its_turn() -> None:
    settings = [soak_runs.Setting.of(number, soak_runs.KINDS) for number in range(2 * len(soak_runs.KINDS))]
    assert settings == [soak_runs.Setting.of(number, soak_runs.KINDS) for number in range(len(settings))]
    assert {setting.kind for setting in settings} == set(soak_runs.KINDS)
    assert all(set(setting.victims) <= set(range(setting.world)) for setting in settings)


def test_results_are_counted_by_what_happened(tmp_path: Path) -> None:
    found = [record(0, "went on", [0.2, 0.4]), record(1, "failed", [], "2 tensors differ"), record(2, "resumed", [])]
    by_kind = {row[0]: row[1:] for row in soak_page.rows(found)}
    assert by_kind["kill"] == ["2", "1", "1", "0", "0", "2", "0.30", "0.40", "3"]
    assert by_kind["raise"] == ["1", "0", "0", "0", "1", "0", "", "", "3"]
    assert by_kind["all"][:5] == ["3", "1", "1", "0", "1"]
    report.write(tmp_path / "soak.json", "soak", {}, found)
    page = soak_page.page(tmp_path)
    assert "- 1 (raise, `" in page and "2 tensors differ" in page and "[soak.json](soak.json)" in page


def test_steps_made_again_are_more_than_their_source_allows() -> None:
    setting = soak_runs.Setting.of(0, ["kill"])
    left, copies = (
        {"source": "the ranks that were left", "repeated": 1},
        {"source": "copies of step 4 …", "repeated": 9},
    )
    assert len(list(soak_runs._too_often_again([left, copies], setting))) == 2
    assert not list(soak_runs._too_often_again([{"source": "the checkpoint x", "repeated": 4}], setting))


def test_an_unknown_kind_is_refused_with_those_that_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        soak.main(["--kinds", "flood"])
    assert "--kinds flood is unknown; there are kill, segfault" in capsys.readouterr().err
