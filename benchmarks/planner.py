"""How long planning takes, against devices, layers and nodes: one table, and JSON with --out.

    python benchmarks/planner.py

Everything runs here, on one core, without torch. Each figure is the shortest of several searches in a fresh process's
state: nothing is kept between them but imports and the facts of the model.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path

from phalanx.model.facts.facts import load
from phalanx.plan.cluster import Cluster
from phalanx.plan.cost import Software
from phalanx.plan.search import search
from phalanx.plan.work import ModelWork
from phalanx.program.work_of_facts import work_of_facts

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


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = [
        _row(name, _work(model, tokens), cluster, batch, options.rounds, target)
        for name, (model, cluster, batch, tokens, target) in CASES.items()
    ]
    seventy = _work("meta-llama/Llama-3.3-70B-Instruct", 4096)
    rows += [_row(f"70B, {n} nodes", seventy, f"{n}x8 H100", 16 * n, options.rounds) for n in NODES]
    rows += [_row(f"{n} layers on 64", _with_layers(seventy, n), "8x8 H100", 512, options.rounds) for n in LAYERS]
    if options.out is not None:
        options.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def _work(name: str, tokens: int) -> ModelWork:
    facts = load(name)
    assert facts is not None
    return work_of_facts(facts, {"batch": 1, "tokens": tokens})


def _with_layers(model: ModelWork, number: int) -> ModelWork:
    first, last = model.blocks[0], model.blocks[-1]
    return replace(model, blocks=(first, *(model.blocks[1],) * number, last))


def _row(
    name: str, model: ModelWork, cluster: str, batch: int, rounds: int, target: float | None = None
) -> dict[str, object]:
    times: list[tuple[float, float]] = []
    for _ in range(rounds):
        started, worked = time.perf_counter(), time.process_time()
        found = search(model, Cluster.read(cluster), Software(), batch)
        times.append((time.perf_counter() - started, time.process_time() - worked))
    wall, cpu = min(own[0] for own in times), min(own[1] for own in times)
    best = found.plans[0]
    goal = f"   (at most {target} s)" if target else ""
    print(
        f"{name:18}  {wall:6.2f} s, of a core {cpu:5.2f} s   {found.tried:4} of {found.known:5} candidates   "
        f"{best.plan.shown[:60]}{goal}",
        flush=True,
    )
    return {
        "case": name, "cluster": cluster, "batch_size": batch, "seconds": wall, "cpu_seconds": cpu,
        "target_seconds": target, "candidates": found.known, "worked_out": found.tried, "plan": best.plan.full_text,
    }  # fmt: skip


if __name__ == "__main__":
    main()
