"""How long planning takes, against devices, layers and nodes: one table, and JSON with --out.

    python benchmarks/planner.py [--rounds 3]

Everything runs here, on one core, without torch. Each figure is the shortest of several searches in a fresh process's
state: nothing is kept between them but imports and the facts of the model.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import report

from phalanx.model.facts.facts import load
from phalanx.planning.cluster import Cluster
from phalanx.planning.cost import Software
from phalanx.planning.search import search
from phalanx.planning.work import ModelWork
from phalanx.predict.work_of_facts import work_of_facts

RESULTS = Path(__file__).parent.parent / "docs" / "results"
INTRO = """# How long planning takes

From facts of the model that are shipped, without torch, on one core, imports not counted: `phalanx plan` for a cluster.
*Worked out*: candidates whose cost was computed; bounds rule the others out. *Asked*: what we set ourselves.
"""
HEADERS = ["model", "cluster", "samples a step", "seconds", "of a core", "asked", "candidates", "worked out", "plan"]
CASES = {
    "1B on 8": ("meta-llama/Llama-3.2-1B", "8 H100", 64, 4096, 0.5),
    "8B on 8": ("meta-llama/Meta-Llama-3-8B", "8 H100", 64, 8192, None),
    "70B on 64": ("meta-llama/Llama-3.3-70B-Instruct", "8x8 H100", 512, 4096, 1.0),
    "70B on 1,024": ("meta-llama/Llama-3.3-70B-Instruct", "128x8 H100", 1024, 4096, None),
    "405B on 1,024": ("meta-llama/Llama-3.1-405B", "128x8 H100", 1024, 8192, None),
    "405B on 16,384": ("meta-llama/Llama-3.1-405B", "2048x8 H100", 2048, 8192, 3.0),
}
NODES = (4, 16, 64, 256)
LAYERS = (20, 40, 80, 160)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = report.options(__doc__ or "")
    parser.add_argument(
        "--rounds", type=int, default=3, metavar="N", help="searches of each, of which the shortest counts"
    )
    chosen = parser.parse_args(arguments)
    results = [
        measured(name, _work(model, tokens), cluster, batch, chosen.rounds, target)
        for name, (model, cluster, batch, tokens, target) in CASES.items()
    ]
    seventy = _work("meta-llama/Llama-3.3-70B-Instruct", 4096)
    results += [measured(f"70B, {n} nodes", seventy, f"{n}x8 H100", 16 * n, chosen.rounds) for n in NODES]
    results += [measured(f"{n} layers on 64", _with_layers(seventy, n), "8x8 H100", 512, chosen.rounds) for n in LAYERS]
    print(report.table(HEADERS, [row(result) for result in results]))
    report.publish(chosen, "planner", {"rounds": chosen.rounds}, results, [])


def _work(name: str, tokens: int) -> ModelWork:
    facts = load(name)
    assert facts is not None
    return work_of_facts(facts, {"batch": 1, "tokens": tokens})


def _with_layers(model: ModelWork, number: int) -> ModelWork:
    first, last = model.blocks[0], model.blocks[-1]
    return replace(model, blocks=(first, *(model.blocks[1],) * number, last))


def measured(
    name: str, model: ModelWork, cluster: str, batch: int, rounds: int, target: float | None = None
) -> dict[str, Any]:
    times: list[tuple[float, float]] = []
    for _ in range(rounds):
        started, worked = time.perf_counter(), time.process_time()
        found = search(model, Cluster.read(cluster), Software(), batch)
        times.append((time.perf_counter() - started, time.process_time() - worked))
    wall, cpu = min(own[0] for own in times), min(own[1] for own in times)
    return {
        "case": name, "cluster": cluster, "batch_size": batch, "seconds": wall, "cpu_seconds": cpu,
        "target_seconds": target, "candidates": found.known, "worked_out": found.tried,
        "plan": found.plans[0].plan.full_text,
    }  # fmt: skip


def row(result: Mapping[str, Any]) -> list[str]:
    asked = f"{result['target_seconds']}" if result["target_seconds"] else ""
    times = [f"{result[name]:.2f}" for name in ("seconds", "cpu_seconds")]
    counts = [f"{result[name]:,}" for name in ("candidates", "worked_out")]
    return [result["case"], result["cluster"], f"{result['batch_size']:,}", *times, asked, *counts, result["plan"]]


def page(folder: Path = RESULTS) -> str:
    """The whole page, from the result file."""
    return report.page(INTRO, folder / "planner.json", "rounds", HEADERS, row)


if __name__ == "__main__":
    main()
