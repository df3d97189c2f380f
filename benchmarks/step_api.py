"""What a loop of one's own costs beside `phalanx.train`: seconds per step of one model under one plan, in turns.

    python benchmarks/step_api.py [--model gpt2] [--tiny] [--plan mb=2] [--steps 30] [--device cpu] [--out FILE]

Both update with the session's own optimizer and clip to the same norm. Steps after the first five are counted.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import report
import torch

import phalanx
from phalanx import tasks
from phalanx.model.zoo.zoo import resolve

WARM = 5


def parser() -> argparse.ArgumentParser:
    given = report.options(__doc__ or "")
    given.add_argument("--model", default="gpt2")
    given.add_argument("--tiny", action="store_true", help="at test size")
    given.add_argument("--plan", default="mb=2")
    given.add_argument("--steps", type=int, default=30)
    given.add_argument("--batch-size", type=int, default=8)
    given.add_argument("--tokens", type=int, default=128)
    given.add_argument("--rounds", type=int, default=3)
    given.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    return given


def own_loop(chosen: argparse.Namespace) -> list[float]:
    spec = resolve(chosen.model, tiny=chosen.tiny)
    task = tasks.get(spec.task)
    batches = [task.synthetic(spec.config, batch=chosen.batch_size, tokens=chosen.tokens, seed=step) for step in (0, 1)]
    session = phalanx.open(
        chosen.model, example=batches[0], plan=chosen.plan, optimizer="adamw", lr=1e-4, tiny=chosen.tiny,
        device=chosen.device, dropout=0.0,
    )  # fmt: skip
    times: list[float] = []
    with session:
        for step in range(chosen.steps):
            loss = session.forward_backward(batches[step % 2])
            session.clip_grad_norm_(1.0)
            session.step()
            loss.item()
            times.append(time.perf_counter())
    return [after - before for before, after in pairwise(times)][WARM:]


def trainer(chosen: argparse.Namespace) -> list[float]:
    seconds: list[float] = []

    class Clock:
        def on_step(self, record: dict[str, Any]) -> None:
            seconds.append(record["step_seconds"])

    with tempfile.TemporaryDirectory(prefix="phalanx-step-") as folder:
        config = phalanx.RunConfig.create(
            plan=chosen.plan, steps=chosen.steps, batch_size=chosen.batch_size, seq_len=chosen.tokens, clip=1.0,
            lr=1e-4, tiny=chosen.tiny, device=chosen.device, dropout=0.0, export=False, progress="off",
            checkpoint_every="never", out=f"{folder}/run",
        )  # fmt: skip
        phalanx.Trainer(chosen.model, "synthetic", config, callbacks=[Clock()]).fit()
    return seconds[WARM + 1 :]


def main(arguments: list[str]) -> None:
    chosen = parser().parse_args(arguments)
    torch.manual_seed(0)
    found: dict[str, list[float]] = {"phalanx.train": [], "a loop of one's own": []}
    for _ in range(chosen.rounds):
        found["phalanx.train"] += trainer(chosen)
        found["a loop of one's own"] += own_loop(chosen)
    results = [{"side": side, "step_seconds": report.summary(seconds)} for side, seconds in found.items()]
    rows = [[side, f"{1e3 * each['step_seconds']['median']:.2f} ms"] for side, each in zip(found, results, strict=True)]
    print(report.table(["loop", "step"], rows))
    ours, theirs = (each["step_seconds"]["median"] for each in reversed(results))
    print(f"{ours / theirs:.3f} of the Trainer's time")
    setting = {name: getattr(chosen, name) for name in ("model", "tiny", "plan", "steps", "batch_size", "tokens")}
    report.publish(chosen, "step_api", setting, results, [])


if __name__ == "__main__":
    main(sys.argv[1:])
