"""What it costs to be ready for faults when there are none, and how much speed is left when there are.

    python benchmarks/vigilance.py [--quick] [--rounds 5] [--faults 2] [--out vigilance.json]

Four CPU ranks train a GPT-2 whose batches are made so large that a step takes about as long as asked. *Overhead*: a run
that survives losses, with copies in memory as often as it chooses and checkpoints in the background, takes turns of ten
steps with a run that has none of these; a pair of runs gives a ratio. *Faults*: in one run a rank is killed every 60
steps and replaced; its steps per second count against those of the steps between faults. Logs are written in all of
them.
"""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import report
from turns import Pair, run_in_turns

from phalanx.config import RunConfig
from phalanx.launch.worker_pool import WorkerPool
from phalanx.observe.runlog import read_log
from phalanx.training.job import Job, pack
from phalanx.training.trainer import Trainer, fit_on_rank

RESULTS = Path(__file__).parent.parent / "docs" / "results"
WORLD, PLANS, EVERY, WARM = 4, ("dp=4,zero=1", "pp=2,dp=2,mb=2"), 60, 8
TURN, FIRST = 10, 15  # steps of a turn, and before the first: a checkpoint lies in the middle of a turn
ON: Mapping[str, Any] = {"on_loss": "replace", "mirror_every": "auto", "checkpoint_every": 50}
OFF: Mapping[str, Any] = {"on_loss": "stop", "checkpoint_every": "never"}
ALLOWED, LEAST = 0.01, 0.97
OVERHEAD = ["plan", "step s", "with everything on (median of pairs)", "lowest", "highest", "aim"]
FAULTS = ["plan", "step s", "steps", "kills", "of the speed without faults", "aim", "noticed to going on s (worst)"]

INTRO = f"""# Ready for faults

What survival costs when nothing happens, and what is left of the speed when ranks are killed. *On* means ranks that
are replaced when they are lost, copies in memory as often as the run chooses, and checkpoints written in the background
every {ON["checkpoint_every"]} steps; *off* means none of these. A pair of runs, one on and one off, gives a ratio, with
everything between their steps. With faults, time is counted over all steps after the first {WARM}."""
IN_TURNS = (
    f"Both runs of a pair take turns on the same cores, {TURN} steps each ([turns.py](../../benchmarks/turns.py)), so "
    "that a machine that becomes slower does so for both."
)
IN_A_ROW = f"Runs of a pair follow each other; time is counted over all steps after the first {WARM}."


def main(arguments: Sequence[str] | None = None) -> None:
    parser = report.options(__doc__ or "")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="pairs of runs per plan (0: none)")
    parser.add_argument("--steps", type=int, default=115, metavar="N", help="of each run of a pair")
    parser.add_argument("--faults", type=int, default=2, metavar="N", help="kills per plan, every 60 steps (0: none)")
    parser.add_argument("--seconds", type=float, default=1.0, metavar="S", help="that a step with faults takes about")
    parser.add_argument("--quick", action="store_true", help="one pair of short runs and one kill, of one plan")
    options = parser.parse_args(arguments)
    rounds, steps, faults, seconds, plans = options.rounds, options.steps, options.faults, options.seconds, PLANS
    if options.quick:
        rounds, steps, faults, seconds, plans = 1, 35, 1, 0.05, PLANS[:1]
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder, _pool() as pool, _pool() as other:
        runs = _Runs((pool, other), Path(folder))
        for plan in plans:
            results += [_overhead(runs, plan, rounds, steps, min(0.2, seconds))] if rounds else []
            results += [_with_faults(runs, plan, faults, seconds)] if faults else []
            print(plan, file=sys.stderr)
    _show(results)
    report.publish(options, "vigilance", {"world": WORLD, "rounds": rounds, "steps": steps}, results, [])


def _pool() -> WorkerPool:
    return WorkerPool(WORLD, threads_per_rank=1, device="cpu")


class _Runs:
    """Each in a folder of its own. pools: of which the first makes the runs that are alone."""

    def __init__(self, pools: Sequence[WorkerPool], folder: Path) -> None:
        self.pools, self._folder, self._count = pools, folder, 0

    def run(self, plan: str, steps: int, batch_size: int, given: Mapping[str, Any], on_event: Any = None) -> list[Any]:
        """The log of a run."""
        job = self._job(plan, steps, batch_size, given)
        with pack(job) as payload:
            self.pools[0].run(fit_on_rank, payload, on_event=on_event, on_loss=given["on_loss"])
        return read_log(job.folder / "log-rank0.jsonl")

    def in_turns(self, plan: str, steps: int, batch_size: int, sides: Sequence[Mapping[str, Any]]) -> list[Pair]:
        jobs = [self._job(plan, steps, batch_size, given) for given in sides]
        return run_in_turns(self.pools, jobs, first=FIRST, steps=TURN)

    def _job(self, plan: str, steps: int, batch_size: int, given: Mapping[str, Any]) -> Job:
        self._count += 1
        config = RunConfig.create(
            tiny=True, seq_len=64, steps=steps, progress="off", export=False, device="cpu", plan=plan,
            batch_size=batch_size, out=self._folder / str(self._count), **given,
        )  # fmt: skip
        return Trainer("gpt2", "synthetic", config).job

    def batch_size(self, plan: str, seconds: float) -> int:
        """With which a step takes about so long."""
        times: dict[int, float] = {}
        for size in (16, 64):
            steps = [own["step_seconds"] for own in self.run(plan, 6, size, OFF) if own["kind"] == "step"]
            times[size] = statistics.median(steps[2:])
        per_sample = max(1e-6, (times[64] - times[16]) / 48)
        return max(16, 8 * round((seconds - times[16]) / per_sample / 8 + 2))


def _times(log: Sequence[Mapping[str, Any]]) -> list[float]:
    """When each step had ended, the newest of those that were made twice."""
    return list({own["step"]: own["time"] for own in log if own["kind"] == "step"}.values())


def _overhead(runs: _Runs, plan: str, rounds: int, steps: int, seconds: float) -> dict[str, Any]:
    size = runs.batch_size(plan, seconds)
    found: list[list[Pair]] = []
    for number in range(rounds):
        sides = (OFF, ON) if number % 2 else (ON, OFF)
        pairs = runs.in_turns(plan, steps, size, sides)
        found.append([(on, off) for off, on in pairs] if number % 2 else pairs)
    step = statistics.median(off for pairs in found for _, off in pairs)
    ratios = report.summary([overhead(pairs) for pairs in found])
    return {"kind": "overhead", "plan": plan, "step": step, "turns": found, "ratio": ratios}


def overhead(pairs: Sequence[Pair]) -> float:
    """Of all turns of two runs together: what happens now and then, as a checkpoint, counts as often as it does."""
    return sum(on for on, _ in pairs) / sum(off for _, off in pairs) - 1


def _with_faults(runs: _Runs, plan: str, faults: int, seconds: float) -> dict[str, Any]:
    """Kills after half of every 60 steps, so that what follows a fault counts."""
    size, draw, struck = runs.batch_size(plan, seconds), random.Random(0), set[int]()

    def on_event(name: str, given: Any) -> None:
        step = given[0]["step"] if name == "on_step" else 0
        if step % EVERY == EVERY // 2 and step not in struck:
            struck.add(step)
            threading.Thread(target=_strike, args=(runs.pools[0], draw, seconds)).start()

    log = runs.run(plan, faults * EVERY, size, ON, on_event)
    losses, times = [own for own in log if own["kind"] == "loss"], _times(log)[WARM:]
    gaps = [after - before for before, after in pairwise(times)]
    speed = statistics.median(gaps) * len(gaps) / (times[-1] - times[0])
    worst = max((own["seconds"] for own in losses), default=0.0)
    return {"kind": "faults", "plan": plan, "step": statistics.median(gaps), "steps": faults * EVERY,
            "kills": len(losses), "speed": speed, "going_on": worst}  # fmt: skip


def _strike(pool: WorkerPool, draw: random.Random, seconds: float) -> None:
    time.sleep(draw.random() * seconds)
    os.kill(pool.pids[draw.randrange(WORLD)], signal.SIGKILL)


def overhead_row(own: Mapping[str, Any]) -> list[str]:
    ratio = own["ratio"]
    shown = (f"{ratio[name]:+.2%}" for name in ("median", "low", "high"))
    return [own["plan"], f"{own['step']:.3f}", *shown, f"at most {ALLOWED:.0%}"]


def faults_row(own: Mapping[str, Any]) -> list[str]:
    counts = (str(own[name]) for name in ("steps", "kills"))
    speed = (f"{own['speed']:.1%}", f"at least {LEAST:.0%}", f"{own['going_on']:.2f}")
    return [own["plan"], f"{own['step']:.3f}", *counts, *speed]


_KINDS: Mapping[str, tuple[list[str], Callable[[Mapping[str, Any]], list[str]]]] = {
    "overhead": (OVERHEAD, overhead_row), "faults": (FAULTS, faults_row),
}  # fmt: skip


def _show(results: Sequence[Mapping[str, Any]]) -> None:
    for kind, (headers, row) in _KINDS.items():
        if rows := [row(own) for own in results if own["kind"] == kind]:
            print(report.table(headers, rows))


def _command(data: Mapping[str, Any]) -> str:
    faults = max((own["steps"] // EVERY for own in data["results"] if own["kind"] == "faults"), default=0)
    return f"python benchmarks/vigilance.py --rounds {data['setting']['rounds']} --faults {faults}"


def page(folder: Path = RESULTS) -> str:
    files = sorted(folder.glob("vigilance*.json"))
    found = [json.loads(path.read_text(encoding="utf-8")) for path in files]
    lines = [INTRO]
    for path, data in zip(files, found, strict=True):
        machine = data["machine"]
        lines += [
            "",
            f"`{_command(data)}` (torch {machine['torch']}), {machine['date']}. {report.busy(machine)} "
            f"Data: [{path.name}]({path.name}).",
        ]
        for kind, (headers, row) in _KINDS.items():
            own = [result for result in data["results"] if result["kind"] == kind]
            if own and kind == "overhead":
                lines += ["", IN_TURNS if all("turns" in result for result in own) else IN_A_ROW]
            if own:
                lines += ["", report.markdown(headers, [row(result) for result in own])]
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    main()
