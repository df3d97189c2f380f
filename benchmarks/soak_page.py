"""The page of the soak (docs/results/soak.md): what happened to how many runs, and what came of them."""

from __future__ import annotations

import json
import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import report

RESULTS = Path(__file__).parent.parent / "docs" / "results"
HEADERS = ["what happened", "runs", "went on", "resumed", "untouched", "failed", "losses", "back to work s (median)",
           "worst", "run s (worst)"]  # fmt: skip
INTRO = """# Soak: random faults, and the run that lost nobody

Each run trains a tiny GPT-2 in float64 on two to four CPU ranks while something happens to it at a random moment. *Went
on*: the ranks that were left, or new ones, ended the run. *Resumed*: what happened cannot be survived in place (before
training, nobody was left, the supervisor was killed); the run ended and was resumed. *Untouched*: nobody was lost.
Every result was compared with a run of one process: parameters (1e-7), losses (1e-9) and samples of every step, how
many steps were made again, processes, shared memory and open files left behind. *Back to work*: from when a loss was
noticed until ranks train again.
"""


def rows(found: Sequence[dict[str, Any]]) -> list[list[str]]:
    by_kind: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for record in found:
        by_kind[record["kind"]].append(record)
    return [_row(kind, own) for kind, own in sorted(by_kind.items())] + ([_row("all", found)] if found else [])


def _row(kind: str, own: Sequence[dict[str, Any]]) -> list[str]:
    outcomes = [record["outcome"] for record in own]
    seconds = sorted(each for record in own for each in record["recoveries"])
    times = [f"{statistics.median(seconds):.2f}", f"{seconds[-1]:.2f}"] if seconds else ["", ""]
    counts = [str(outcomes.count(name)) for name in ("went on", "resumed", "untouched", "failed")]
    return [kind, str(len(own)), *counts, str(len(seconds)), *times, f"{max(r['seconds'] for r in own):.0f}"]


def page(folder: Path = RESULTS) -> str:
    data = json.loads((folder / "soak.json").read_text(encoding="utf-8"))
    at, found = data["machine"], data["results"]
    failed = [
        f"- {r['number']} ({r['kind']}, `{r['plan']}`): {r['problem']}" for r in found if r["outcome"] == "failed"
    ]
    reasons = Counter(r["why_resumed"] for r in found if r.get("why_resumed"))
    resumed = [f"- {count} \N{MULTIPLICATION SIGN} {why}" for why, count in reasons.most_common()]
    lines = [
        INTRO,
        f"`python benchmarks/soak.py --count {len(found)}` (torch {at['torch']}, {at['cores']} cores), {at['date']}. "
        "Data: [soak.json](soak.json).",
        "",
        report.markdown(HEADERS, rows(found)),
        *(["", "Why runs were resumed:", "", *resumed] if resumed else []),
        *(["", "Failures:", "", *failed] if failed else []),
    ]
    return "\n".join([*lines, ""])
