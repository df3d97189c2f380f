"""What the page of recovery times says of what was measured."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "benchmarks"))

import recovery
import report


def kill(seconds: float, **parts: float) -> dict[str, Any]:
    return {"seconds": seconds, "usual": 0.2, "parts": parts}


def test_the_page_holds_times_against_their_aims_and_tells_where_they_go(tmp_path: Path) -> None:
    kills = [kill(0.6, noticed=0.1, plan=0.3), kill(0.8, noticed=0.1, plan=0.1), kill(0.7, noticed=0.2, plan=0.2)]
    found = [
        {"plan": "dp=4", "on_loss": "shrink", "what": "kill", "kills": kills},
        {"plan": "dp=4", "on_loss": "replace", "what": "kill", "kills": kills},
        {"plan": "dp=4", "on_loss": "shrink", "what": "hang", "kills": kills},
        {"plan": "dp=4", "on_loss": recovery.SPARE, "what": "kill", "kills": kills},
    ]
    assert recovery.row(found[0], gpu=False) == [
        "dp=4",
        "shrink",
        "kill",
        "3",
        "0.700",
        "0.800",
        "0.200",
        "at most 0.70",
    ]
    assert [recovery.row(result, gpu=False)[-1] for result in found[1:]] == [
        "at most 3.00",
        "at most 1.50",
        "at most 0.70",
    ]
    assert {recovery.row(result, gpu=True)[-1] for result in found} == {"at most 2.20"}
    assert recovery.parts_row(found[0])[3:] == [
        "0.100",
        "0.300",
        "0.000",
        "0.000",
        "0.000",
        "0.000",
        "0.200",
        "0.000",
        "0.000",
    ]
    report.write(tmp_path / "recovery.json", "recovery", {"gpu": False, "repeats": 3, "compile": "auto"}, found)
    page = recovery.page(tmp_path)
    assert "| dp=4 | shrink | kill | 3 | 0.700 |" in page and "| first step |" in page
