"""What a loop of one's own costs beside `phalanx.train`: processor time per step of one model under one plan, in turns.

    python benchmarks/step_api.py [--before CHECKOUT] [--rounds 5] [--steps 30] [--device cpu] [--out FILE]

Both update with AdamW and clip to the same norm. --before: another checkout of Phalanx, such as one of before there was
`phalanx.open`, whose Trainer takes turns with them. Each measures in a process of its own; steps after the first five
count. Wall times stand beside, for machines that do nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, os.environ.get("PHALANX_CHECKOUT", str(Path(__file__).parent.parent)))

import report

WARM, ROOT = 5, Path(__file__).parent.parent
RESULTS = ROOT / "docs" / "results"
CASES = ({"batch_size": 4, "tokens": 32, "plan": "mb=1"}, {"batch_size": 8, "tokens": 128, "plan": "mb=4"})
HEADERS = ["model", "batch", "plan", "phalanx.train ms", "own loop ms", "own loop / train", "train / train before"]
INTRO = """# What a loop of one's own costs

`phalanx.train` and a loop with `phalanx.open` (`forward_backward`, `clip_grad_norm_`, `step`) train the same model
under the same plan, one process after the other, in turns. Times are processor times of a step on one thread, which
waiting and other processes hardly change: of each process the median step, of these the median over the rounds. Ratios
are formed within a round; in brackets their lowest and highest. *Before* is the Trainer of the commit before there was
a step API.
"""


def options() -> argparse.ArgumentParser:
    given = report.options(__doc__ or "")
    given.add_argument("--model", default="gpt2", help="at test size")
    given.add_argument("--steps", type=int, default=30)
    given.add_argument("--rounds", type=int, default=5)
    given.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    given.add_argument("--before", type=Path, metavar="CHECKOUT", help="of which the Trainer is measured as well")
    given.add_argument("--one", choices=("train", "loop"), help=argparse.SUPPRESS)
    given.add_argument("--case", type=json.loads, help=argparse.SUPPRESS)
    return given


class Clock:
    """Processor and wall time of every step."""

    def __init__(self) -> None:
        self.times: list[tuple[float, float]] = []

    def on_step(self, record: Mapping[str, Any] | None = None) -> None:
        self.times.append((time.process_time(), time.perf_counter()))

    def steps(self) -> dict[str, float]:
        """The medians."""
        later = self.times[WARM:]
        cpu, wall = ([b[i] - a[i] for a, b in pairwise(later)] for i in (0, 1))
        return {"cpu": statistics.median(cpu), "wall": statistics.median(wall)}


def own_loop(model: str, case: Mapping[str, Any], steps: int, device: str) -> dict[str, float]:
    import phalanx
    from phalanx import tasks
    from phalanx.model.zoo.zoo import resolve

    spec, clock = resolve(model, tiny=True), Clock()
    task = tasks.get(spec.task)
    batches = [
        task.synthetic(spec.config, batch=case["batch_size"], tokens=case["tokens"], seed=step) for step in (0, 1)
    ]
    session = phalanx.open(
        model, example=batches[0], plan=case["plan"], optimizer="adamw", lr=1e-4, tiny=True, device=device, dropout=0.0
    )
    with session:
        for step in range(steps):
            loss = session.forward_backward(batches[step % 2])
            session.clip_grad_norm_(1.0)
            session.step()
            loss.item()
            clock.on_step()
    return clock.steps()


def trainer(model: str, case: Mapping[str, Any], steps: int, device: str) -> dict[str, float]:
    import phalanx

    clock = Clock()
    with tempfile.TemporaryDirectory(prefix="phalanx-step-") as folder:
        config = phalanx.RunConfig.create(
            plan=case["plan"], steps=steps, batch_size=case["batch_size"], seq_len=case["tokens"], clip=1.0, lr=1e-4,
            tiny=True, device=device, dropout=0.0, export=False, progress="off", out=f"{folder}/run",
        )  # fmt: skip
        phalanx.Trainer(model, "synthetic", config, callbacks=[clock]).fit()
    return clock.steps()


def measured(chosen: argparse.Namespace, side: str, case: Mapping[str, Any], checkout: Path) -> dict[str, float]:
    """In a process of its own."""
    command = [sys.executable, __file__, "--one", side, "--case", json.dumps(case), "--model", chosen.model]
    command += ["--steps", str(chosen.steps), "--device", chosen.device]
    paths = {"PHALANX_CHECKOUT": str(checkout), "PYTHONPATH": str(checkout)}
    cache = f"{tempfile.gettempdir()}/phalanx-step-api-{os.getpid()}-{abs(hash(checkout))}"
    environment = {**os.environ, **paths, "OMP_NUM_THREADS": "1", "PHALANX_CACHE": cache}
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE)
    return json.loads(done.stdout.splitlines()[-1])


def measure(chosen: argparse.Namespace, case: Mapping[str, Any]) -> dict[str, Any]:
    sides = {"train": ("train", ROOT), "loop": ("loop", ROOT)}
    if chosen.before:
        sides["before"] = ("train", chosen.before.resolve())
    found: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    for turn in range(chosen.rounds):
        order = list(sides)
        for name in order[turn % len(order) :] + order[: turn % len(order)]:
            found[name].append(measured(chosen, sides[name][0], case, sides[name][1]))
    result: dict[str, Any] = {"model": chosen.model, **case}
    for kind in ("cpu", "wall"):
        seconds = {name: [each[kind] for each in rounds] for name, rounds in found.items()}
        result[f"{kind}_seconds"] = {name: report.summary(values) for name, values in seconds.items()}
        pairs = {"loop / train": ("loop", "train"), "train / before": ("train", "before")}
        result[f"{kind}_ratios"] = {
            name: report.summary([a / b for a, b in zip(seconds[over], seconds[under], strict=True)])
            for name, (over, under) in pairs.items()
            if under in seconds
        }
    return result


def rows(results: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    found: list[list[str]] = []
    for each in results:
        seconds, ratios = each["cpu_seconds"], each["cpu_ratios"]
        found.append([
            f"{each['model']}, test size", f"{each['batch_size']} × {each['tokens']}", each["plan"],
            *(f"{1e3 * seconds[name]['median']:.2f}" for name in ("train", "loop")),
            *(_ratio(ratios.get(name)) for name in ("loop / train", "train / before")),
        ])  # fmt: skip
    return found


def _ratio(found: Mapping[str, float] | None) -> str:
    return "" if found is None else f"{found['median']:.3f} ({found['low']:.3f}–{found['high']:.3f})"


def page(folder: Path = RESULTS) -> str:
    """The whole page, from the result file."""
    data = json.loads((folder / "step_api.json").read_text())
    machine, setting = data["machine"], data["setting"]
    before = " --before CHECKOUT" if setting["before"] else ""
    command = f"python benchmarks/step_api.py{before} --rounds {setting['rounds']} --steps {setting['steps']}"
    where = f"{machine['processor']} (torch {machine['torch']}), {machine['date']}"
    lines = [f"`{command}` on {where}. Data: [step_api.json](step_api.json).", report.busy(machine), ""]
    return "\n".join([INTRO, *lines, report.markdown(HEADERS, rows(data["results"])), ""])


def main(arguments: list[str]) -> None:
    chosen = options().parse_args(arguments)
    if chosen.one:
        run = own_loop if chosen.one == "loop" else trainer
        print(json.dumps(run(chosen.model, chosen.case, chosen.steps, chosen.device)))
        return
    results = [measure(chosen, case) for case in CASES]
    print(report.table(HEADERS, rows(results)))
    setting = {name: getattr(chosen, name) for name in ("rounds", "steps", "device")}
    report.publish(chosen, "step_api", {**setting, "before": bool(chosen.before)}, results, [])


if __name__ == "__main__":
    main(sys.argv[1:])
