"""What it costs to mirror what one rank alone holds, step by step (`--mirror-every 0`), beside not doing so.

    python benchmarks/mirrors.py [--quick] [--rounds 3] [--batch 16 128] [--out mirrors.json]

Four CPU ranks train a GPT-2, with mirrors and without in turn. Counted is the processor time of all ranks per step,
which other work on the machine hardly changes, and the time of a step, which it does.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import report

from phalanx.config import RunConfig
from phalanx.launch.worker_pool import WorkerPool
from phalanx.observe.runlog import read_log
from phalanx.training.job import pack
from phalanx.training.trainer import Trainer, fit_on_rank

WORLD, PLANS, WARM = 4, ("pp=4,mb=4", "pp=2,tp=2,mb=2", "dp=4,zero=1", "dp=4,zero=3"), 4
HEADERS = ["plan", "batch", "processor ms per step", "with mirrors", "more", "step ms", "with mirrors", "more"]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = report.options(__doc__ or "")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="pairs of runs per case")
    parser.add_argument("--steps", type=int, default=44, metavar="N", help="of each run")
    parser.add_argument("--batch", type=int, nargs="+", default=[16, 128], metavar="N", help="samples of a step")
    parser.add_argument("--quick", action="store_true", help="one pair of short runs")
    options = parser.parse_args(arguments)
    rounds, steps, plans, batches = options.rounds, options.steps, PLANS, options.batch
    if options.quick:
        rounds, steps, plans, batches = 1, 12, PLANS[:1], batches[:1]
    results: list[dict[str, Any]] = []
    with WorkerPool(WORLD, threads_per_rank=1, device="cpu") as pool:
        for plan in plans:
            for batch in batches:
                results.append(_measured(pool, plan, batch, rounds, steps))
                print(*row(results[-1]), file=sys.stderr)
    print(report.table(HEADERS, [row(own) for own in results]))
    report.publish(options, "mirrors", {"world": WORLD, "rounds": rounds, "steps": steps}, results, [])


def _measured(pool: WorkerPool, plan: str, batch: int, rounds: int, steps: int) -> dict[str, Any]:
    found: dict[Any, list[tuple[float, float]]] = {0: [], "never": []}
    for number in range(rounds):
        for every in sorted(found, key=str, reverse=bool(number % 2)):
            found[every].append(_run(pool, plan, batch, steps, every))
    names = {"never": "off", 0: "on"}
    return {"plan": plan, "batch": batch} | {
        f"{kind}_{names[every]}": statistics.median(pair[place] for pair in pairs)
        for every, pairs in found.items()
        for place, kind in enumerate(("processor", "step"))
    }


def _run(pool: WorkerPool, plan: str, batch: int, steps: int, every: int | str) -> tuple[float, float]:
    """Processor seconds of all ranks per step, and the seconds of one, after the first few."""
    used: dict[int, float] = {}

    def on_event(name: str, given: Any) -> None:
        if name == "on_step":
            used[given[0]["step"]] = processor_seconds(pool.pids.values())

    with tempfile.TemporaryDirectory() as folder:
        config = RunConfig.create(
            tiny=True, model_options={"n_embd": 128, "n_layer": 8}, seq_len=64, steps=steps, progress="off",
            export=False, device="cpu", plan=plan, batch_size=batch, out=Path(folder) / "run", on_loss="replace",
            mirror_every=every, checkpoint_every="never",
        )  # fmt: skip
        with pack(Trainer("gpt2", "synthetic", config).job) as payload:
            pool.run(fit_on_rank, payload, on_event=on_event, on_loss="replace")
        log = read_log(Path(folder) / "run" / "log-rank0.jsonl")
    seconds = [own["step_seconds"] for own in log if own["kind"] == "step" and own["step"] > WARM]
    last = max(used)
    return (used[last] - used[WARM]) / (last - WARM), statistics.median(seconds)


def processor_seconds(pids: Iterable[int]) -> float:
    """That processes have used so far, all threads of them."""
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def row(own: Mapping[str, Any]) -> list[str]:
    cells = [str(own["plan"]), str(own["batch"])]
    for kind in ("processor", "step"):
        off, on = own[f"{kind}_off"], own[f"{kind}_on"]
        cells += [f"{1000 * off:.1f}", f"{1000 * on:.1f}", f"{on / off - 1:+.1%}"]
    return cells


if __name__ == "__main__":
    main()
