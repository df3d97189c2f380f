"""The benchmark of deterministic runs: its table says what was measured."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "benchmarks"))

import deterministic
import report


def test_a_row_shows_what_slots_and_exact_sums_cost() -> None:
    times = {"free": [1.0, 1.0], "slots": [2.0, 2.0], "deterministic": [3.0, 3.0]}
    result = {"plan": "dp=1", "slot": 1, "tokens": 128, **{kind: report.summary(own) for kind, own in times.items()}}
    row = deterministic.row(result)
    assert row == ["dp=1", "128", "1", "1.000", "2.000", "3.000", "2.00", "1.50"]
    assert len(row) == len(deterministic.HEADERS)
    (panel,) = deterministic.panels([result])
    assert tuple(panel.series) == deterministic.KINDS
