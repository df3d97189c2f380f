"""Our own runs: what a step of each of many plans is predicted to take, and what it takes, on 4 ranks of this machine.

    python benchmarks/own_runs.py [--passes 6] [--out docs/results/own_runs.json]            4 CPU ranks, a thread each
    python benchmarks/own_runs.py --gpu [--out docs/results/own_runs_gpu.json]               4 ranks that share one GPU
    python benchmarks/own_runs.py --link 1gbit [--out docs/results/own_runs_link.json]       4 nodes with slow links

First the ranks say what `phalanx train` would take without a plan, which is one plan more, and what its planning says
of each. A pass measures what a prediction is made of (segments of the model by degree and size, transfers, what ranks
do to each other, steps of one rank that does everything) and then a few steps of every plan; nothing of a plan's own
steps enters its prediction. Predicted is the simulation of its program, measured the median over passes; spread is the
middle half of what passes say, from the median.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import in_lab
import plot
import report
from compare_setting import Setting, Size
from foresight import Known, joined
from own_choice import CHOSEN, Planned, planned, with_chosen
from own_runs_rank import Seen, Task, measure
from shared_gpu import pool_of

from phalanx.errors import PhalanxError
from phalanx.model.captured import Captured
from phalanx.plan.complete import complete
from phalanx.plan.plan import Plan

WORLD = 4
PLANS = (
    "dp=4", "dp=4,mb=2", "dp=4,mb=4", "dp=4,zero=1", "dp=4,zero=2,mb=2", "dp=4,zero=3", "dp=4,recompute=light",
    "dp=4,recompute=block", "tp=4", "tp=4,sequence=yes", "tp=4,mb=2,overlap=halves", "tp=2,dp=2", "tp=2,dp=2,mb=2",
    "tp=2,dp=2,sequence=yes,zero=1", "tp=2,dp=2,overlap=halves", "pp=2,dp=2,mb=4", "pp=2,dp=2,mb=4,zero=1",
    "pp=2,dp=2,mb=4,schedule=zb-h1", "pp=2,dp=2,mb=4,schedule=interleaved,v=2", "pp=2,dp=2,mb=4,recompute=unit",
    "pp=2,tp=2,mb=4", "pp=2,tp=2,mb=8,schedule=gpipe", "pp=4,mb=8", "pp=4,mb=16", "pp=4,mb=8,schedule=gpipe",
    "pp=4,mb=8,schedule=zb-h1", "pp=4,mb=8,schedule=eager-1f1b", "pp=4,mb=8,recompute=block",
)  # fmt: skip
HEADERS = ["ranks", "plan", "predicted ms", "measured ms", "spread", "error", "by planning ms"]
KIB, MIB = 2**10, 2**20


@dataclass(frozen=True)
class Kind:
    """Ranks of one sort and the model that they train. sizes: bytes of transfers that are measured."""

    name: str
    size: Size
    dtype: str
    device: str
    sizes: tuple[int, ...]


CPU = Kind("4 CPU ranks", Size(6, 256, 2048, samples=16, tokens=64), "float32", "cpu",
           (KIB, 64 * KIB, 512 * KIB, 4 * MIB))  # fmt: skip
GPU = Kind("4 ranks on one GPU", Size(6, 1024, 8192, samples=32, tokens=1024), "bfloat16", "cuda",
           (4 * KIB, 512 * KIB, 4 * MIB, 16 * MIB, 48 * MIB))  # fmt: skip


def main() -> None:
    options = _options()
    kind = GPU if options.gpu else CPU
    name = f"4 nodes, {options.link}" if options.link else kind.name
    setting = Setting("llama", kind.size, kind.dtype, masters=True)
    captured = setting.capture()
    task = Task(setting, _plans(setting, captured, options.only), options.passes, kind.device, kind.sizes)
    with _ranks(options.link, kind) as run:
        plans, own = with_chosen(task, run(planned, task, captured))
        print(f"train without a plan: {own.why}", file=sys.stderr, flush=True)
        task = replace(task, plans=plans)
        seen = run(measure, task, captured)
    results = compared(name, task, captured, seen, own, options.link is not None)
    print(report.table(HEADERS, rows(results)))
    print(summary(results), choice(results), sep="\n")
    about = {"ranks": name, **asdict(kind), "passes": options.passes, "profile": results and _shown(seen),
             "chosen": {"plan": own.plan.full_text, "why": own.why}}  # fmt: skip
    report.publish(options, "own_runs", about, results, [panel(name, results)])


def _plans(setting: Setting, captured: Captured, only: str) -> dict[str, Plan]:
    weights, samples = captured.blocks.flops(captured.dims(setting.batch())), setting.size.samples
    texts = [text for text in PLANS if only in text]
    return {text: complete(text, world=WORLD, batch_size=samples, costs=weights).plan for text in texts}


@contextmanager
def _ranks(link: str | None, kind: Kind) -> Iterator[Callable[..., list[Any]]]:
    """Jobs on four ranks: of a pool, or every rank a node of its own."""
    if link is None:
        with pool_of(WORLD, kind.device) as pool:
            yield lambda job, *given: pool.run(
                job, *given, on_event=lambda event, about: in_lab.say(f"{event}: {about}")
            )
    else:
        spec = f"nodes={WORLD},ranks_per_node=1,link={link},device=cpu:1thread"
        yield lambda job, *given: in_lab.run(spec, job, *given, device=kind.device)


# What is predicted.


def compared(
    name: str, task: Task, captured: Captured, seen: Sequence[Seen], own: Planned, is_apart: bool
) -> list[dict[str, Any]]:
    """Every plan: predicted beside measured. own: what planning says; is_apart: every rank has its own network."""
    known = Known(task, captured, seen[0], is_apart)
    found: list[dict[str, Any]] = []
    for text, plan in task.plans.items():
        times = seen[0].steps[text]
        middle = statistics.quantiles(times, n=4) if len(times) > 1 else [times[0]] * 3
        found.append({
            "ranks": name, "plan": text, "full": plan.full_text, "predicted_seconds": known.step(text, plan),
            "planned_seconds": own.seconds[text],
            "measured_seconds": report.summary(times), "spread": (middle[2] - middle[0]) / 2 / middle[1],
            "cores": os.cpu_count(), "load": os.getloadavg()[1],
        })  # fmt: skip
    return found


def _shown(seen: Sequence[Seen]) -> dict[str, Any]:
    """What predictions were made of, for whoever reads the results."""
    others = joined(seen[0].others)
    return {
        "transfers": {f"{kind} of {ranks}": points for (kind, ranks), points in others.transfers.items()},
        "beside": {f"{a} beside {b}": speeds for (a, b), speeds in others.beside.items()}, "issue": others.issue,
        "start": others.start, "meeting": others.meeting,
        "update": statistics.median(seen[0].update),
        "references": {mb: statistics.median(found) for mb, found in seen[0].references.items()},
    }  # fmt: skip


# What is said.


def error(result: Mapping[str, Any]) -> float:
    return result["predicted_seconds"] / median(result) - 1


def regret(results: Sequence[Mapping[str, Any]], count: int, by: str = "predicted_seconds") -> float:
    """How much slower the best of so many plans that are told to be the fastest is than the fastest."""
    told = sorted(results, key=lambda own: own[by])[:count]
    return min(map(median, told)) / min(map(median, results)) - 1


def median(result: Mapping[str, Any]) -> float:
    return result["measured_seconds"]["median"]


def summary(results: Sequence[Mapping[str, Any]]) -> str:
    errors = sorted(abs(error(own)) for own in results)
    worst = max(results, key=lambda own: abs(error(own)))
    return (
        f"{len(results)} plans: mean error {statistics.fmean(errors):.1%}, worst {error(worst):+.1%} "
        f"({worst['plan']}), mean spread of repeats {statistics.fmean(own['spread'] for own in results):.1%}; "
        f"chosen plan {regret(results, 1):.1%} slower than the fastest, best of three {regret(results, 3):.1%}"
    )


def choice(results: Sequence[Mapping[str, Any]]) -> str:
    """Of `train` without a plan; nothing where that was not asked."""
    own = next((own for own in results if own["plan"] == CHOSEN), None)
    if own is None:
        return ""
    slower = median(own) / min(map(median, results)) - 1
    first, three = (regret(results, count, "planned_seconds") for count in (1, 3))
    return (
        f"`phalanx train` without a plan takes {Plan.parse(own['full']).shown}: {slower:.1%} slower than the fastest. "
        f"Of all these plans the one that its planning puts first is {first:.1%} slower, the best of its first three "
        f"{three:.1%}"
    )


def rows(results: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    return [
        [own["ranks"], own["plan"], f"{own['predicted_seconds'] * 1e3:.1f}", f"{median(own) * 1e3:.1f}",
         f"±{own['spread']:.1%}", f"{error(own):+.1%}",
         f"{own['planned_seconds'] * 1e3:.1f}" if "planned_seconds" in own else ""]
        for own in results
    ]  # fmt: skip


def panel(name: str, results: Sequence[Mapping[str, Any]]) -> plot.Panel:
    predicted = [plot.Point(own["plan"], *[own["predicted_seconds"]] * 3) for own in results]
    measured = [plot.Point.of(own["plan"], own["measured_seconds"]) for own in results]
    return plot.Panel(name, "", "seconds of a step", {"predicted": predicted, "measured": measured})


def _options() -> argparse.Namespace:
    parser = report.options(__doc__ or "")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--gpu", action="store_true", help="4 ranks that share one GPU, instead of CPU ranks")
    where.add_argument("--link", metavar="RATE", help="4 nodes with one CPU rank each, with links of this rate: 1gbit")
    parser.add_argument("--passes", type=int, default=6, help="profiles and steps of each plan (default: 6)")
    parser.add_argument("--only", default="", help="plans whose text contains this")
    return parser.parse_args()


if __name__ == "__main__":
    try:
        main()
    except PhalanxError as failure:
        raise SystemExit(str(failure)) from None
