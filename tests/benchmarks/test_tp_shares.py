"""The published shares are about every architecture, and each decoder and encoder reaches the target."""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

from tp_shares import TP, rows  # noqa: E402
from tp_shares_page import TARGET, page  # noqa: E402

from tests.parity.architectures import ARCHITECTURES  # noqa: E402

RESULTS = json.loads((ROOT / "docs" / "results" / "tp_shares.json").read_text(encoding="utf-8"))["results"]


def test_every_architecture_is_counted_at_both_degrees() -> None:
    assert [(r["model"], r["tp"]) for r in RESULTS] == [(name, tp) for name in ARCHITECTURES for tp in TP]


def test_every_share_reaches_the_target_and_what_is_missing_has_a_reason() -> None:
    for result in RESULTS:
        assert TARGET <= result["share"] <= 1 + 1e-9, result["model"]
        assert result["alike"] or result["share"] > 1 - 1e-6, result["model"]


def result(tp: int, share: float) -> dict[str, object]:
    alike = [["layers.*.k_proj.weight", "fewer heads", 3]]
    return {"model": "m", "tp": tp, "tokens": None, "share": share, "busiest": 0.014, "alike": alike}


def test_a_model_is_one_row_with_each_reason_once(tmp_path: Path) -> None:
    results = [result(2, 1.0), result(4, 0.9)]
    reason = "layers.*.k_proj.weight: fewer heads"
    assert rows(results) == [["m", "", "100.0%", "90.0%", "+1.4%", "+1.4%", reason]]
    machine = {"torch": "2", "transformers": "5", "date": "today"}
    (tmp_path / "tp_shares.json").write_text(json.dumps({"machine": machine, "results": results}))
    assert "0 of 1 architectures reach 95 %; the least is 90.0% (m, tp=4)." in page(tmp_path)
