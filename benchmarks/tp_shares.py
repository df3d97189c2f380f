"""The share of each architecture's matrix FLOPs that tensor parallelism really splits, at its real size.

    python benchmarks/tp_shares.py [--only gpt2-xl] [--out FILE] [--plot FILE]

Nothing is timed and nothing computed: every rank's graphs are counted on tensors without contents, so a product that
ranks do alike counts on each of them. `phalanx inspect MODEL --tp N` shows the same for one model in full.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import report
from plot import Panel, Point

from phalanx.cli.models import choose_dims
from phalanx.model.facts.facts import load
from tests.parity.architectures import ARCHITECTURES

TP = (2, 4)
HEADERS = ["model", "tokens", *[f"split, tp={tp}" for tp in TP], *[f"busiest rank, tp={tp}" for tp in TP], "done alike"]


def measure(names: list[str]) -> Iterator[dict[str, Any]]:
    """One result per model and degree."""
    import torch

    from phalanx import tasks
    from phalanx.model.capture import capture
    from phalanx.model.shard import report as split
    from phalanx.model.zoo.zoo import resolve
    from phalanx.plan.plan import Plan

    for name in names:
        spec, facts = resolve(name), load(name)
        assert facts is not None, f"{name} is not in the zoo"
        dims = choose_dims(facts, 1, None)
        captured = capture(spec, tasks.get(spec.task).inputs(spec.config), dtype=torch.bfloat16, check=False)
        for tp in TP:
            found = split.report(captured, Plan(tp=tp), torch.bfloat16, dims)
            busiest = max(found.flops_per_rank) * tp / sum(found.flops_per_rank) - 1
            yield {
                "model": name, "tp": tp, "tokens": dims.get("tokens"), "flops": found.flops, "share": found.share,
                "busiest": busiest, "parameters_per_rank": max(found.parameters_per_rank) / found.parameters,
                "alike": [list(each) for each in found.whole],
            }  # fmt: skip


def rows(results: list[dict[str, Any]]) -> list[list[str]]:
    """One row per model."""
    found: list[list[str]] = []
    for name in dict.fromkeys(result["model"] for result in results):
        own = {result["tp"]: result for result in results if result["model"] == name}
        tokens = own[TP[0]]["tokens"]
        alike = dict.fromkeys(f"{weight}: {reason}" for tp in TP for weight, reason, _ in own[tp]["alike"])
        found.append(
            [name, str(tokens or ""), *[f"{own[tp]['share']:.1%}" for tp in TP],
             *[f"+{own[tp]['busiest']:.1%}" for tp in TP], "; ".join(alike)]
        )  # fmt: skip
    return found


def panels(results: list[dict[str, Any]]) -> list[Panel]:
    series = {
        f"tp={tp}": [Point(r["model"], *[r["share"]] * 3) for r in results if r["tp"] == tp] for tp in TP
    }  # fmt: skip
    return [Panel("matrix FLOPs that are split", "", "share", series, level=0.95)]


def main() -> None:
    parser = report.options(__doc__ or "")
    parser.add_argument("--only", metavar="MODEL", choices=ARCHITECTURES, help="one model instead of all")
    chosen = parser.parse_args()
    results = list(measure([chosen.only] if chosen.only else ARCHITECTURES))
    print(report.table(HEADERS, rows(results)))
    report.publish(chosen, "tp_shares", {"dtype": "bfloat16", "batch": 1}, results, panels(results))


if __name__ == "__main__":
    main()
