"""The benchmark of pauses: its table says what was measured, the slowest rank counting."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "benchmarks"))

import migrate
import report
from migrate_ranks import Measured


def test_the_slowest_rank_counts() -> None:
    ranks = [Measured(1.0, [0.2, 0.5], {}, [0.1, 0.1], [1.0, 2.0], 8, 8), Measured(1.0, [0.3, 0.4], {}, [], [], 8, 8)]
    assert migrate._slowest(ranks, "pauses") == [0.3, 0.5]


def test_a_row_has_a_cell_for_every_header() -> None:
    seconds = report.summary([0.25])
    result = {
        "old": "pp=4", "new": "dp=4", "state_bytes": 2**20, "bytes": 2**19, "first": 1.5, "pauses": seconds,
        "plain": seconds, "through_files": seconds, "beside": seconds, "parts": {"move": seconds},
    }  # fmt: skip
    row = migrate.row(result)
    assert len(row) == len(migrate.HEADERS)
    assert row[:6] == ["pp=4", "dp=4", "1.0 MiB", "512.0 KiB", "0.250", "0.000"]
