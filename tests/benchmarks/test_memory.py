"""The benchmarks of one device at test size: every step of them but the GPU's own figures."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "benchmarks"))

import largest
import memory


def test_a_case_is_predicted_and_run() -> None:
    case = memory.Case(memory.Setting("gpt2", 4, 32), "mb=2,recompute=light,offload=optimizer", "bfloat16, masters")
    found = memory.measure(case, "cpu", steps=3)
    assert len(found["seconds"]) == 1 and found["seconds"][0] > 0
    assert found["predicted"]["parameters"] > 0 and found["on_host"]["moments"] > 0


@pytest.mark.long
def test_the_largest_of_test_size_trains(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["largest.py", "--device", "cpu", "--steps", "3", "--one", "mb=2 0"])
    largest.main()
    found = json.loads(capsys.readouterr().out)
    assert len(found["seconds"]) == 1 and found["predicted"] > 0 and found["tokens"] == 16 * 32
    shown = largest.row({"cap": None, "layers": 2, "candidate": "mb=2"} | found, "no device that is known")
    assert shown[0] == shown[5] == "–"  # no cap, and no share of a rate that nobody knows


def test_the_page_says_what_the_cap_costs() -> None:
    rows = [{"cap": cap, "layers": 2, "parameters": 5e9, "seconds": [seconds]} for cap, seconds in [(16, 5), (None, 4)]]
    assert largest._prices(rows) == ["- 5.00B parameters within 16 GiB, at 0.80× the tokens/s of the whole card."]
