"""From the moment a rank is killed, or hangs, to the next training step, on four CPU ranks.

    python benchmarks/recovery.py [--quick] [--repeats 5] [--out recovery.json]

A rank is killed, or stopped by a signal so that it hangs, at a random moment of a run of a tiny GPT-2; what counts is
the time from the signal to the end of the first step that the new generation makes, beside a usual step of it. With
`shrink` survivors hold the state; with `replace` a process is forked, prepares the run and gets its state from them.
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import report

from phalanx.config import RunConfig
from phalanx.launch.worker_pool import WorkerPool
from phalanx.observe.runlog import read_log
from phalanx.training.job import pack
from phalanx.training.trainer import Trainer, fit_on_rank

WORLD, STEPS = 4, 24
KILL, HANG = signal.SIGKILL, signal.SIGSTOP
CASES = (
    ("dp=4", "shrink", KILL), ("pp=2,dp=2,mb=2", "shrink", KILL), ("dp=4", "replace", KILL),
    ("pp=2,dp=2,mb=2", "replace", KILL), ("dp=4", "shrink", HANG), ("pp=2,dp=2,mb=2", "shrink", HANG),
)  # fmt: skip
HEADERS = ["plan", "on_loss", "what", "times", "to next step s (median)", "worst", "usual step s",
           "noticed to going on s"]  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    parser = report.options(__doc__ or "")
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="of each case")
    parser.add_argument("--quick", action="store_true", help="one of each case")
    options = parser.parse_args(arguments)
    repeats, draw = 1 if options.quick else options.repeats, random.Random(0)
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder, WorkerPool(WORLD, threads_per_rank=1, device="cpu") as pool:
        for plan, on_loss, number in CASES:
            outs = (Path(folder) / f"{len(results)}-{n}" for n in range(repeats))
            kills = [_struck(pool, out, plan, on_loss, number, draw) for out in outs]
            what = "hang" if number == HANG else "kill"
            results.append({"plan": plan, "on_loss": on_loss, "what": what, "kills": kills})
            print(f"{plan}, {on_loss}, {what}", file=sys.stderr)
    print(report.table(HEADERS, [row(result) for result in results]))
    report.publish(options, "recovery", {"world": WORLD, "steps": STEPS, "repeats": repeats}, results, [])


def _struck(
    pool: WorkerPool, out: Path, plan: str, on_loss: Any, number: int, draw: random.Random
) -> dict[str, float]:  # fmt: skip
    """One run, one kill or hang."""
    config = RunConfig.create(
        tiny=True, seq_len=32, batch_size=16, steps=STEPS, progress="off", export=False, checkpoint_every="never",
        device="cpu", out=out, plan=plan, on_loss=on_loss,
    )  # fmt: skip
    trainer, victim, after = Trainer("gpt2", "synthetic", config), draw.randrange(WORLD), draw.randrange(8, 16)
    struck: list[float] = []

    def strike() -> None:
        time.sleep(draw.random() * 0.02)
        struck.append(time.time())
        os.kill(pool.pids[victim], number)

    def on_event(name: str, given: Any) -> None:
        if name == "on_step" and given[0]["step"] == after and not struck:
            threading.Thread(target=strike).start()

    with pack(trainer.job) as payload:
        pool.run(fit_on_rank, payload, on_event=on_event, on_loss=on_loss)
    records = read_log(out / "log-rank0.jsonl")
    (loss,) = (record for record in records if record["kind"] == "loss")
    steps = [record for record in records if record["kind"] == "step"]
    first = next(record for record in steps if record["time"] > loss["time"])
    usual = statistics.median(record["step_seconds"] for record in steps if record["step"] < loss["step"])
    return {"seconds": first["time"] - struck[0], "usual": usual, "going_on": loss["seconds"]}


def row(result: dict[str, Any]) -> list[str]:
    kills = result["kills"]
    seconds = sorted(kill["seconds"] for kill in kills)
    others = (statistics.median(kill[name] for kill in kills) for name in ("usual", "going_on"))
    numbers = (statistics.median(seconds), seconds[-1], *others)
    return [
        result["plan"],
        result["on_loss"],
        result["what"],
        str(len(kills)),
        *(f"{number:.3f}" for number in numbers),
    ]


if __name__ == "__main__":
    main()
