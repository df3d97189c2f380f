"""The benchmark of checkpoints: what it measures is a state that was saved, and its page shows what its JSON holds."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "benchmarks"))

import checkpoints


def test_a_state_is_measured_and_its_page_shows_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "checkpoints.json"
    checkpoints.main(["--sizes", "0.001", "--repeats", "2", "--folder", str(tmp_path), "--out", str(out)])
    (result,) = json.loads(out.read_text())["results"]
    assert 0.9e6 < result["bytes"] <= 1e6 and result["checkpoint"]["repeats"] == 2 and result["stall"]["repeats"] == 1
    assert 0 < result["stall"]["median"] < result["checkpoint"]["high"]
    shown = checkpoints.row(result)
    assert shown[3] in capsys.readouterr().out
    page = checkpoints.page(tmp_path)
    assert f"| {' | '.join(shown)} |" in page and "## State on CPU" in page and "(checkpoints.json)" in page
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoints.json"], "nothing is left on the disk"


def test_rates_are_bytes_by_seconds_beside_plain_ones() -> None:
    seconds = {name: {"median": value} for name, value in [("plain", 2.0), ("four_plain", 1.0), ("checkpoint", 1.25)]}
    shown = checkpoints.row(
        {"bytes": 10**9, "with_read_back": 1.5, "first_stall": 0.5, "stall": {"median": 0.1}} | seconds
    )
    assert shown == ["953.7 MiB", "500", "1,000", "800", "160%", "80%", "0.25", "0.500", "0.100"]
