"""Schedules: the step and bubble that the simulator predicts beside what ranks measure.

    python benchmarks/schedules.py [--rounds 8] [--out docs/results/schedules.json]
    python benchmarks/schedules.py --gpu [--out docs/results/schedules_gpu.json]

Three settings: 2 CPU ranks that compute; 4 CPU ranks whose computation is a timed wait, with real communication; and
with --gpu 4 ranks that share one GPU. All schedules run in turn, round by round. Where ranks compute, predictions are
made as those of `own_runs.py`: nothing of a schedule's own steps enters them. Timed waits have a profile of every
second round of 1F1B (F, BW, norm, update) and of ZB-H1 (B and W apart), and are compared with the other rounds.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import plot
import report
from compare_setting import Setting, Size
from foresight import Known
from own_runs_rank import Seen, Task, measure
from schedule_profile import FUSED, SPLIT, costs, profile
from schedule_ranks import Bench, Timed, run_bench
from shared_gpu import pool_of

from phalanx.engine.compose import bucket_names
from phalanx.engine.describe import describe
from phalanx.engine.measured import merge
from phalanx.launch.worker_pool import WorkerPool
from phalanx.model.captured import Captured
from phalanx.plan.complete import complete
from phalanx.plan.plan import Plan
from phalanx.predict.simulate import simulate
from phalanx.predict.timeline import Pair, Timeline
from phalanx.program.compile import compile_plan
from phalanx.program.instructions import Op

SCHEDULES = {"gpipe": "", FUSED: "", "eager-1f1b": "", "interleaved": ",v=2", SPLIT: "", "zb-v": ""}
HEADERS = ["ranks", "schedule", "predicted ms", "measured ms (spread)", "error", "predicted bubble", "measured bubble"]
KIB, MIB = 2**10, 2**20
WAITS = {Op.F: 4e-3, Op.B: 5e-3, Op.W: 4e-3, Op.BW: 9e-3}  # of a layer
ENDS = (0.25, 0.75)  # the same of the embedding and of head and loss, as parts of a layer's


@dataclass(frozen=True)
class Kind:
    """Ranks of one sort: how many, the model they run, and whether they really compute. transfers: bytes of those that
    are measured."""

    name: str
    pp: int
    size: Size
    dtype: str
    device: str = "cpu"
    transfers: tuple[int, ...] = (KIB, 64 * KIB, 512 * KIB, 4 * MIB)
    timed: bool = False


CPU = Kind("2 CPU ranks", 2, Size(layers=6, width=256, vocabulary=2048, samples=8, tokens=64), "float32")
TIMED = Kind("4 CPU ranks, timed waits", 4, Size(14, 256, 2048, samples=8, tokens=64), "float32", timed=True)
GPU = Kind("4 ranks on one GPU", 4, Size(14, 1024, 8192, samples=32, tokens=1024), "bfloat16", "cuda",
           (4 * KIB, 512 * KIB, 4 * MIB, 16 * MIB, 48 * MIB))  # fmt: skip


def main() -> None:
    options = _options()
    results: list[dict[str, Any]] = []
    kinds = [GPU] if options.gpu else [CPU, TIMED]
    for kind in (kind for kind in kinds if options.only in kind.name):
        results += _measure(kind, options.rounds)
        print(report.table(HEADERS, rows(results[-len(SCHEDULES) :])), flush=True)
    setting = {kind.name: asdict(kind) for kind in kinds} | {"rounds": options.rounds}
    report.publish(options, "schedules", setting, results, _panels(results))


def _panels(results: Sequence[Mapping[str, Any]]) -> list[plot.Panel]:
    """One for each kind of ranks."""
    panels: list[plot.Panel] = []
    for kind in dict.fromkeys(result["ranks"] for result in results):
        found = [result for result in results if result["ranks"] == kind]
        simulated = [plot.Point(r["schedule"], *[r["simulated_seconds"]] * 3) for r in found]
        measured = [plot.Point.of(r["schedule"], r["measured_seconds"]) for r in found]
        panels.append(plot.Panel(kind, "", "seconds of a step", {"simulated": simulated, "measured": measured}))
    return panels


def rows(results: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """One for each schedule, as tables and pages show them."""
    found: list[list[str]] = []
    for result in results:
        measured, predicted = result["measured_seconds"], result["simulated_seconds"]
        spread = f"{measured['median'] * 1e3:.1f} ({measured['low'] * 1e3:.1f}–{measured['high'] * 1e3:.1f})"
        bubbles = [f"{result['simulated_bubble']:.1%}", f"{result['measured_bubble']['median']:.1%}"]
        error = f"{Pair(predicted, measured['median']).error:+.1%}"
        found.append([result["ranks"], result["schedule"], f"{predicted * 1e3:.1f}", spread, error, *bubbles])
    return found


def _measure(kind: Kind, rounds: int) -> Iterator[dict[str, Any]]:
    """Every schedule on ranks of one kind: predicted and measured."""
    setting = Setting("llama", kind.size, kind.dtype, masters=True)
    captured = setting.capture()
    plans = _plans(kind, setting, captured)
    with pool_of(kind.pp, kind.device) as pool:
        if kind.timed:
            yield from _timed(kind, Bench(setting, plans, rounds, _waits(kind)), captured, pool)
            return
        task = Task(setting, plans, rounds, kind.device, kind.transfers, kind.pp, is_recorded=True)
        seen: list[Seen] = pool.run(measure, task, captured, on_event=_say)
    known = Known(task, captured, seen[0])
    for name, plan in plans.items():
        steps = [merge(parts) for parts in zip(*(own.parts[name] for own in seen), strict=True)]
        yield _result(kind, plan, known.step(name, plan), known.bubble(name, plan), seen[0].steps[name], steps)


def _timed(kind: Kind, bench: Bench, captured: Captured, pool: WorkerPool) -> Iterator[dict[str, Any]]:
    """Predicted from every second round, compared with the others."""
    seen: list[Timed] = pool.run(run_bench, bench, captured, on_event=_say)
    steps = {name: [merge(parts) for parts in zip(*(s.parts[name] for s in seen))] for name in bench.plans}
    buckets = bucket_names(captured.blocks, captured.trainable).names
    elements = [sum(math.prod(captured.shapes[name]) for name in names) for names in buckets]
    dims = captured.dims(bench.micro_batch())
    shape = describe(captured, bench.plans[FUSED], kind.dtype).eager
    known = profile({name: found[::2] for name, found in steps.items()}, bench.plans[FUSED], shape, elements)
    for name, plan in bench.plans.items():
        predicted = simulate(compile_plan(plan, shape), costs(known, plan, elements, dims, seen[0].link))
        whole = [max(seconds) for seconds in zip(*(s.seconds[name] for s in seen))]
        yield _result(kind, plan, predicted.makespan, predicted.mean_bubble, whole[1::2], steps[name][1::2])


def _plans(kind: Kind, setting: Setting, captured: Captured) -> dict[str, Plan]:
    dims = captured.dims(setting.batch())
    weights = _waits(kind)[Op.F] if kind.timed else captured.blocks.flops(dims)
    texts = {name: f"pp={kind.pp},mb=8,schedule={name}{more}" for name, more in SCHEDULES.items()}
    samples = setting.size.samples
    return {n: complete(t, world=kind.pp, batch_size=samples, costs=weights).plan for n, t in texts.items()}


def _waits(kind: Kind) -> dict[Op, tuple[float, ...]]:
    first, last = ENDS
    return {op: (first * s, *(s,) * kind.size.layers, last * s) for op, s in WAITS.items()}


def _say(event: str, about: str) -> None:
    print(f"{event}: {about}", file=sys.stderr, flush=True)


def _result(
    kind: Kind, plan: Plan, predicted: float, bubble: float, seconds: list[float], steps: Sequence[Timeline]
) -> dict[str, Any]:
    """seconds: of steps as a training loop sees them; steps: recorded ones."""
    return {
        "ranks": kind.name, "schedule": plan.schedule, "plan": plan.full_text, "simulated_seconds": predicted,
        "simulated_bubble": bubble, "measured_seconds": report.summary(seconds),
        "measured_bubble": report.summary([step.mean_bubble for step in steps]), "cores": os.cpu_count(),
        "load": os.getloadavg()[1],
    }  # fmt: skip


def _options() -> argparse.Namespace:
    parser = report.options(__doc__ or "")
    parser.add_argument("--gpu", action="store_true", help="4 ranks that share one GPU, instead of CPU ranks")
    parser.add_argument("--only", default="", help="of the CPU settings the one whose name contains this")
    parser.add_argument("--rounds", type=int, default=8, help="recorded steps of each schedule (default: 8)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
