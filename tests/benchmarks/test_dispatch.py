"""The benchmark of what the engine itself takes: that nothing is computed, and its page."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "benchmarks"))

import dispatch
import report

ENGINE = {"kind": "engine", "plan": "mb=32", "instructions": 417, "alone": report.summary([3.0, 4.0]),
          "board": report.summary([5.0])}  # fmt: skip
MAKING = {"kind": "making", "plan": "pp=8,mb=64", "instructions": 6680, "compile": report.summary([0.5]),
          "simulate": report.summary([0.2, 0.4]), "both": report.summary([0.7, 0.9])}  # fmt: skip


def test_functions_return_at_once_what_they_returned_first() -> None:
    calls: list[int] = []
    cached = dispatch.cache_first(lambda number: calls.append(number) or number)
    assert [cached(1), cached(2)] == [1, 1] and calls == [1]


def test_both_tables_are_drawn() -> None:
    engine, making = dispatch.panels([ENGINE, MAKING])
    assert [point.x for point in engine.series["board"]] == ["mb=32"] and engine.level == 4
    assert list(making.series) == ["compile", "simulate"]


def test_a_page_shows_both_tables(tmp_path: Path) -> None:
    report.write(tmp_path / "dispatch.json", "dispatch", {"rounds": 20}, [ENGINE, MAKING])
    page = dispatch.page(tmp_path)
    assert "| mb=32 | 417 | 3.5 (3.0–4.0) | 5.0 (5.0–5.0) | at most 4 |" in page
    assert "| pp=8,mb=64 | 6680 | 0.50 (0.50–0.50) | 0.30 (0.20–0.40) | 0.80 (0.70–0.90) |" in page
    assert "`python benchmarks/dispatch.py --rounds 20`" in page and "(dispatch.json)" in page
