"""What the table of families says: outcomes, shares, and every reason once; and that a case that hangs or fails is a
row like any other."""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import robustness  # noqa: E402
import robustness_workers as workers  # noqa: E402
from robustness_families import FAMILIES  # noqa: E402
from robustness_page import page  # noqa: E402

from phalanx.errors import CaptureError  # noqa: E402

RESULTS = robustness.read(robustness.RESULTS)


def test_at_least_sixty_families_are_tried_and_none_is_wrong_or_crashes() -> None:
    assert len(FAMILIES) >= 60
    failed = [(row["family"], row["plan"]) for row in RESULTS if row["outcome"] in ("wrong", "crash")]
    assert failed == []


def test_fifty_families_are_exact_in_a_pipeline_and_split_with_nine_tenths_of_their_parameters_divided() -> None:
    exact = {(row["family"], row["plan"]): row for row in RESULTS if row["outcome"] == "exact"}
    split = [family for family in FAMILIES if exact.get((family, "tp=2"), {}).get("share", 0) >= 0.9]
    assert len([family for family in split if (family, "pp=2") in exact]) >= 50


def row(family: str, plan: str, outcome: str, **more: object) -> dict[str, object]:
    return {"family": family, "task": "causal-lm", "plan": plan, "outcome": outcome, **more}


def test_a_family_is_one_row_and_a_reason_stands_once(tmp_path: Path) -> None:
    results = [
        row("llama", "mb=2", "exact"), row("llama", "pp=2", "exact"),
        row("llama", "tp=2", "exact", share=0.97, date="2026-11-17"),
        row("mamba", "mb=2", "refused", reason="a loop over tokens"),
        row("mamba", "tp=2", "refused", reason="a loop over tokens"),
    ]  # fmt: skip
    machine = {"torch": "2", "transformers": "5", "date": "today"}
    (tmp_path / "robustness.json").write_text(json.dumps({"machine": machine, "results": results}))
    text = page(tmp_path)
    assert "| llama | causal-lm | exact | exact | exact | – | – | 97% |" in text
    assert "2 families in 5 cases: 3 exact, 2 refused, 0 wrong, 0 crash. 1 families are exact under both" in text
    assert "- mamba (`mb=2`, `tp=2`) — refused: a loop over tokens" in text
    assert "(torch 2, transformers 5), up to 2026-11-17, 4 cases before their days were kept. Data" in text


def test_reasons_name_files_below_the_installed_packages() -> None:
    assert robustness.shortened("in /a/b/site-packages/transformers/x.py,\n line 3") == "in transformers/x.py, line 3"


class Nobody(robustness.Helpers):
    def get(self) -> tuple[Any, Any]:
        return None, None


def outcome(monkeypatch: pytest.MonkeyPatch, does: Any) -> dict[str, Any]:
    """Of a case that is verified by `does`."""
    from phalanx.verification import verify

    monkeypatch.setattr(verify, "verify_case", does)
    return robustness.outcome("gpt2", "causal-lm", "mb=2", 1, Nobody())


def raises(error: Exception) -> Any:
    def verify_case(*_: object) -> None:
        raise error

    return verify_case


def test_each_way_to_end_is_an_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    assert outcome(monkeypatch, raises(CaptureError("why not")))["outcome"] == "refused"
    assert outcome(monkeypatch, raises(CaptureError("the graph disagrees with the model")))["outcome"] == "wrong"
    assert outcome(monkeypatch, raises(KeyError("x")))["reason"].startswith("KeyError: 'x' (test_robustness.py:")
    hung = outcome(monkeypatch, lambda *_: time.sleep(30))
    assert (hung["outcome"], hung["reason"]) == ("crash", "no end within 1 s")


ANSWERING = """
import json, os, sys
for line in sys.stdin:
    case = json.loads(line)
    if case["plan"] == "tp=2":
        os.abort()
    print(json.dumps({"family": case["family"], "plan": case["plan"], "outcome": "exact"}), flush=True)
"""


def test_cases_are_tried_beside_each_other_and_one_that_ends_its_process_is_a_crash(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Stand(workers.Worker):
        def __init__(self) -> None:
            super().__init__((sys.executable, "-c", ANSWERING))

    monkeypatch.setattr(workers, "Worker", Stand)
    asked = {family: robustness.cases([family], ["pp=2", "tp=2", "mb=2"], 9) for family in ("gpt2", "llama", "t5")}
    rows = {(row["family"], row["plan"]): row for row in workers.results(asked, 2, threading.Event())}
    assert len(rows) == 9
    assert {key[1] for key, row in rows.items() if row["outcome"] == "exact"} == {"pp=2", "mb=2"}
    assert rows["t5", "tp=2"] == {**row("t5", "tp=2", "crash"), "task": "text-to-text", "reason": workers.UNFINISHED}
    assert [row["plan"] for row in robustness.in_order(rows)[:3]] == ["mb=2", "pp=2", "tp=2"]


def test_slices_are_asked_of_causal_models_only() -> None:
    assert [case["plan"] for case in robustness.cases(["bert"], ["tp=2", "slices=2"], 9)] == ["tp=2"]
