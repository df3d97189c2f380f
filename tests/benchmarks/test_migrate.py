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


SECONDS = report.summary([0.25])
RESULT = {
    "old": "pp=4", "new": "dp=4", "state_bytes": 2**20, "bytes": 2**19, "first": 1.5, "pauses": SECONDS,
    "plain": SECONDS, "through_files": SECONDS, "beside": SECONDS, "parts": {"move": SECONDS},
}  # fmt: skip


def test_a_page_shows_every_row_of_its_results(tmp_path: Path) -> None:
    setting = {"ranks": migrate.CPU.name, "allowed": 0.15, "world": 4, "layers": 6, "repeats": 1}
    report.write(tmp_path / "migrate.json", "migrate", setting, [RESULT])
    page = migrate.page(tmp_path)
    assert f"| {' | '.join(migrate.row(RESULT))} |" in page and "(migrate.json)" in page


def test_a_row_has_a_cell_for_every_header() -> None:
    row = migrate.row(RESULT)
    assert len(row) == len(migrate.HEADERS)
    assert row[:6] == ["pp=4", "dp=4", "1.0 MiB", "512.0 KiB", "0.250", "0.000"]
