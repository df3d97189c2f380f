"""What a user sees of a comparison: options, progress, a table, and JSON from which the results page is written."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import plot
import report
from compare import OURS, Build, Comparison, combine, compare, verdict
from compare_setting import CPU_SIZE, GPU_SIZE, SHAPES, Setting
from shared_gpu import rank_environment, shared_gpu

from phalanx.errors import RankError
from phalanx.launch.worker_pool import WorkerPool
from phalanx.model.captured import Captured
from phalanx.plan.complete import complete

HEADERS = [
    "ranks", "model", "plan", "against", "ours ms", "theirs ms", "theirs / ours (quartiles)", "processor time",
    "ours is",
]  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A plan as text, and who does the same with torch."""

    plan: str
    rivals: Mapping[str, Build]


def run(name: str, description: str, cases_of: Callable[[int], Sequence[Case]], *, masters: bool) -> None:
    """cases_of: the cases for a number of ranks. masters: whether half precision keeps float32 weights."""
    options = _options(description)
    about = {"size": asdict(GPU_SIZE if options.gpu else CPU_SIZE), "dtype": _dtype(options), "masters": masters}
    about |= {"rounds": _rounds(options), "steps": _steps(options), "quick": options.quick}
    results: list[dict[str, Any]] = []
    for world in options.ranks or ([2, 4] if options.gpu and not options.quick else [2]):
        with _pool(world, options.gpu) as pool:
            for shape in options.shapes or (SHAPES[:1] if options.quick else SHAPES):
                for found in _of_model(pool, _setting(shape, options, masters), cases_of(world), world, options):
                    results.append(found)
                    if options.out:  # after each, so that a run that is cut short has not run for nothing
                        report.write(Path(options.out), name, about, results)
    print(report.table(HEADERS, rows(results)))
    report.publish(options, name, about, results, [_panel(description, results)])


def rows(results: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """One for each rival, as tables and pages show them."""
    found: list[list[str]] = []
    for result in results:
        place = [str(result["ranks"]), result["model"], result["plan"]]
        if "error" in result:
            found.append([*place, ", ".join(result["against"]), *[""] * 4, result["error"][:80]])
            continue
        ours = result["seconds"][OURS]
        for rival, ratio in result["ratios"].items():
            theirs, worked = result["seconds"][rival], result["processor_ratios"][rival]
            times = [f"{ours['median'] * 1e3:.0f}", f"{theirs['median'] * 1e3:.0f}"]
            found.append([*place, rival, *times, _spread(ratio), _spread(worked), verdict(ratio)])
    return found


def _panel(description: str, results: Sequence[Mapping[str, Any]]) -> plot.Panel:
    series: dict[str, list[plot.Point]] = {}
    for result in (result for result in results if "error" not in result):
        for rival, ratio in result["ratios"].items():
            series.setdefault(rival, []).append(plot.Point.of(f"{result['model']} {result['plan']}", ratio))
    return plot.Panel(description.splitlines()[0], "", "theirs / ours", series, level=1.0)


def _steps(options: argparse.Namespace) -> int:
    """Per round: more than one, because what a step leaves to do (sharing parameters) hides in the next."""
    return 4 if options.gpu else 2


def _spread(ratio: Mapping[str, float]) -> str:
    return f"{ratio['median']:.2f}× ({ratio['low']:.2f}–{ratio['high']:.2f})"


def _of_model(
    pool: WorkerPool, setting: Setting, cases: Sequence[Case], world: int, options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    captured = setting.capture()
    costs = captured.blocks.flops(captured.dims(setting.batch()))
    assert len(costs) == setting.size.layers + 2, "the stages made by hand have other cuts"
    for case in cases:
        if options.only and options.only not in case.plan:
            continue
        plan = complete(case.plan, world=world, batch_size=setting.size.samples, costs=costs).plan
        comparison = Comparison(setting, plan, case.rivals, _rounds(options), _steps(options))
        found = {"ranks": world, "model": setting.shape, "plan": case.plan, "against": list(case.rivals)}
        found |= _outcome(pool, comparison, captured)
        print("  ".join(" ".join(row) for row in rows([found])), file=sys.stderr, flush=True)
        yield found


def _outcome(pool: WorkerPool, comparison: Comparison, captured: Captured) -> dict[str, Any]:
    """A rival that cannot do it is a result, too."""
    try:
        return combine(pool.run(compare, comparison, captured), comparison.setting.dtype)
    except RankError as error:
        return {"error": str(error).splitlines()[0]}


@contextmanager
def _pool(world: int, gpu: bool) -> Iterator[WorkerPool]:
    if not gpu:
        # The other rank is on this machine; the host's name may lead elsewhere.
        with WorkerPool(
            world, threads_per_rank=1, device="cpu", environment=lambda _: {"GLOO_SOCKET_IFNAME": "lo"}
        ) as pool:
            yield pool
        return
    with shared_gpu(world), WorkerPool(world, device="cuda", environment=rank_environment) as pool:
        yield pool


def _setting(shape: str, options: argparse.Namespace, masters: bool) -> Setting:
    dtype = _dtype(options)
    return Setting(shape, GPU_SIZE if options.gpu else CPU_SIZE, dtype, masters or dtype == "float32")


def _dtype(options: argparse.Namespace) -> str:
    return "bfloat16" if options.gpu else "float32"


def _rounds(options: argparse.Namespace) -> int:
    return options.rounds or (8 if options.quick else 24)


def _options(description: str) -> argparse.Namespace:
    parser = report.options(description)
    parser.add_argument("--gpu", action="store_true", help="ranks that share one GPU (bfloat16), instead of CPU ranks")
    parser.add_argument("--ranks", type=int, action="append", help="default: 2; with --gpu 2 and 4, unless --quick")
    parser.add_argument("--shapes", action="append", choices=SHAPES, help="default: all, with --quick the first")
    parser.add_argument("--only", help="plans that contain this text")
    parser.add_argument("--quick", action="store_true", help="one model, two ranks, few rounds")
    parser.add_argument("--rounds", type=int, help="default: 24, with --quick 8")
    return parser.parse_args()
