"""The page docs/results/robustness.md, from what `robustness.py` tried."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import report
from robustness import PLANS

RESULTS = Path(__file__).parent.parent / "docs" / "results"
INTRO = """# Robustness: families of transformers under every kind of plan

Each family is a tiny model, made from the defaults of its configuration class: a few layers of each kind, 64 wide. A
case is `phalanx verify` in float64: two steps of two shapes, and every gradient and every updated parameter must equal
those of the plain HuggingFace model to 1e-9. *refused* means that Phalanx says before training why it cannot; the
reasons are below. *wrong* is a result that differs, *crash* an error without a reason or no end in time: neither may
occur. Slices of the tokens are for causal models; – is what was not tried. `split` is the share of the layers'
parameters that two ranks divide between them under `tp=2`.

What `verify` finds wrong because a model has a backward of its own, which no graph of its forward has, is asked of the
check that training makes first, and is *refused* where that refuses it (yoso).
"""


def page(folder: Path = RESULTS) -> str:
    data = json.loads((folder / "robustness.json").read_text(encoding="utf-8"))
    machine, results = data["machine"], data["results"]
    lines = [
        INTRO,
        f"`python benchmarks/robustness.py` (torch {machine['torch']}, transformers {machine['transformers']}), "
        f"{_when(results)}. Data: [robustness.json](robustness.json).",
        "",
        _sentence(results),
        "",
        report.markdown(["family", "task", *PLANS, "split"], _rows(results)),
        "",
        "## Reasons",
        "",
        *_reasons(results),
    ]
    return "\n".join([*lines, ""])


def _when(results: list[dict[str, Any]]) -> str:
    """Days on which the cases were tried: what a change touched may have been tried later than the rest."""
    days = sorted({row.get("date", "") for row in results})
    undated = sum("date" not in row for row in results)
    said = f"{days[-1]}" if len(days) == 1 else f"up to {days[-1]}"
    return f"{said}, {undated} cases before their days were kept" if undated else said


def _families(results: list[dict[str, Any]]) -> dict[str, dict[str, dict[str, Any]]]:
    """family → plan → result."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for row in results:
        found.setdefault(row["family"], {})[row["plan"]] = row
    return found


def _rows(results: list[dict[str, Any]]) -> list[list[str]]:
    rows: list[list[str]] = []
    for family, own in _families(results).items():
        split = own.get("tp=2", {}).get("share")
        cells = [own[plan]["outcome"] if plan in own else "–" for plan in PLANS]
        task = next(iter(own.values()))["task"]
        rows.append([family, task, *cells, "" if split is None else f"{split:.0%}"])
    return sorted(rows, key=lambda row: row[1])


def _sentence(results: list[dict[str, Any]]) -> str:
    families = _families(results)
    both = [own for own in families.values() if all(own.get(p, {}).get("outcome") == "exact" for p in ("pp=2", "tp=2"))]
    split = [own for own in both if own["tp=2"]["share"] >= 0.9]
    counts = {kind: sum(row["outcome"] == kind for row in results) for kind in ("exact", "refused", "wrong", "crash")}
    said = ", ".join(f"{number} {kind}" for kind, number in counts.items())
    return (
        f"{len(families)} families in {len(results)} cases: {said}. {len(both)} families are exact under both `pp=2` "
        f"and `tp=2`; {len(split)} of these split at least 90 % of their layers' parameters."
    )


def _reasons(results: list[dict[str, Any]]) -> list[str]:
    """Every reason once, with the cases it stands for."""
    cases: dict[str, dict[str, list[str]]] = {}
    for row in results:
        if "reason" in row:
            reason = f"{row['outcome']}: {row['reason']}"
            cases.setdefault(reason, {}).setdefault(row["family"], []).append(row["plan"])
    return [
        f"- {', '.join(f'{family} ({_plans(plans)})' for family, plans in families.items())} — {reason}"
        for reason, families in cases.items()
    ]


def _plans(plans: list[str]) -> str:
    return "all plans" if len(plans) >= len(PLANS) - 1 else ", ".join(f"`{plan}`" for plan in plans)
