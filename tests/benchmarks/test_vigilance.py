"""The benchmark of what survival costs: what it counts, and its page."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "benchmarks"))

import pytest
import report
import vigilance

OVERHEAD = {"kind": "overhead", "plan": "dp=4", "step": 0.25, "ratio": report.summary([0.004, 0.006])}
FAULTS = {
    "kind": "faults", "plan": "pp=4", "step": 1.0, "steps": 120, "kills": 2, "speed": 0.981, "going_on": 0.42,
}  # fmt: skip


def test_a_step_that_was_made_twice_counts_when_it_was_made_last() -> None:
    log = [{"kind": "step", "step": step, "time": float(at)} for at, step in enumerate((1, 2, 3, 2, 3, 4))]
    assert vigilance._times([*log, {"kind": "loss", "time": 9.0}]) == [0.0, 3.0, 4.0, 5.0]


def test_overhead_counts_what_happens_in_one_turn_of_many() -> None:
    assert vigilance.overhead([(0.2, 0.2), (0.24, 0.2), (0.2, 0.2), (0.2, 0.2)]) == pytest.approx(0.05)


def test_rows_have_a_cell_for_every_header() -> None:
    assert vigilance.overhead_row(OVERHEAD) == ["dp=4", "0.250", "+0.50%", "+0.40%", "+0.60%", "at most 1%"]
    assert vigilance.faults_row(FAULTS) == ["pp=4", "1.000", "120", "2", "98.1%", "at least 97%", "0.42"]
    assert len(vigilance.OVERHEAD) == 6 and len(vigilance.FAULTS) == 7


def test_a_page_shows_what_all_its_files_hold(tmp_path: Path) -> None:
    for name, own in (("vigilance", OVERHEAD), ("vigilance_faults", FAULTS)):
        report.write(tmp_path / f"{name}.json", "vigilance", {"rounds": 2}, [own])
    page = vigilance.page(tmp_path)
    assert f"| {' | '.join(vigilance.overhead_row(OVERHEAD))} |" in page and "(vigilance.json)" in page
    assert f"| {' | '.join(vigilance.faults_row(FAULTS))} |" in page and "(vigilance_faults.json)" in page
    assert "`python benchmarks/vigilance.py --rounds 2 --faults 0`" in page
    assert "`python benchmarks/vigilance.py --rounds 2 --faults 2`" in page
    assert vigilance.IN_A_ROW in page and vigilance.IN_TURNS not in page
    report.write(tmp_path / "vigilance.json", "vigilance", {"rounds": 2}, [{**OVERHEAD, "turns": [[(0.2, 0.2)]]}])
    assert vigilance.IN_TURNS in vigilance.page(tmp_path) and vigilance.IN_A_ROW not in vigilance.page(tmp_path)
