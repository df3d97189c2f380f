"""Token slices: steps and memory of a pipeline with and without them, beside what is simulated; and what they cost.

    python benchmarks/slices.py [--only NAME] [--out docs/results/slices.json]
    python benchmarks/slices.py --gpu [--budget 240] [--out docs/results/slices_gpu.json]

Ranks of a pipeline (4 that share one GPU; without --gpu 2 on CPU cores, to see that it works) first measure what slices
of their blocks take. From that every plan is simulated, and the best slicing is chosen. Then, for each number and
length of sequences, all plans run in turn: 1F1B without slices, with equal slices, with those planned. With most
sequences the same slices also run in eager 1F1B, which keeps more, and in GPipe order, which keeps everything. Before
that, one rank alone on its device: what slicing costs where there is no pipeline. Results are written after each case.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import plot
import report
from compare_setting import Setting, Size
from shared_gpu import rank_environment, shared_gpu
from slice_ranks import Case, Effort, Facts, Seen, median_of, profile, run_case
from slice_simulation import BlockTimes, Known, ends_of, planned

from phalanx.engine.compose import bucket_names
from phalanx.engine.describe import describe
from phalanx.engine.measure import measure
from phalanx.engine.measured import merge
from phalanx.launch.worker_pool import WorkerPool
from phalanx.model.captured import Captured
from phalanx.plan.complete import complete
from phalanx.plan.plan import Plan
from phalanx.predict.from_profile import RankProfile
from phalanx.predict.split_facts import Split
from phalanx.profile.slice_fit import Fit, fit

KIB, MIB = 2**10, 2**20
WHOLE, PLANNED, EAGER, ALL_FIRST = "whole", "planned", "eager", "gpipe"
HEADERS = [
    "sequences", "tokens", "slices", "simulated ms", "measured ms", "error", "speed-up", "simulated GiB", "peak GiB",
]  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """What is run where: `cases` are numbers of sequences and their tokens, each run with all `slicings`. `alone` is
    the model of the single rank and `compile` its mode. Pipelines run uncompiled: all ranks would have to compile for
    every length of a slice, which takes longer than all that is measured."""

    name: str
    pp: int
    size: Size  # its samples and tokens are the most that a profile looks at
    dtype: str
    cases: tuple[tuple[int, int], ...]
    slicings: tuple[int, ...]
    effort: Effort
    alone: Size
    alone_slicings: tuple[int, ...]
    compile: str


GPU = Shape(
    "4 ranks on one GPU", 4, Size(4, 4096, 4096, samples=1, tokens=32768), "bfloat16",
    ((1, 8192), (2, 8192), (8, 8192), (1, 32768), (1, 16384), (2, 32768)), (2, 4, 8, 16),
    Effort(512, 1, (64 * KIB, MIB, 8 * MIB, 48 * MIB)),
    alone=Size(2, 8192, 4096, 1, 8192), alone_slicings=(4, 8), compile="inductor",
)  # fmt: skip
CPU = Shape(
    "2 CPU ranks", 2, Size(4, 64, 128, samples=1, tokens=256), "float32", ((1, 256), (4, 256)), (2, 4),
    Effort(32, 1, (KIB, 64 * KIB)),
    alone=Size(2, 64, 128, 1, 256), alone_slicings=(2, 4), compile="off",
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    options = _options(arguments)
    shape, begin = GPU if options.gpu else CPU, time.monotonic()
    setting: dict[str, Any] = {"shape": asdict(shape), "rounds": options.rounds, "only": options.only}
    results: list[dict[str, Any]] = []
    if _wanted(options.only, "cost"):
        results.append(_cost(shape, options.rounds))
        _show(results[-1])
    if any(_wanted(options.only, _name(case)) for case in shape.cases):
        _pipeline(shape, options, setting, begin, results)
    report.publish(options, "slices", setting, results, panels(results))


def _pipeline(
    shape: Shape, options: argparse.Namespace, setting: dict[str, Any], begin: float, results: list[dict[str, Any]]
) -> None:
    captured = _captured(shape.size, shape.dtype)
    with _pool(shape, shape.pp) as pool:
        known, setting["profile"] = _profile(shape, captured, pool)
        for number, tokens in (case for case in shape.cases if _wanted(options.only, _name(case))):
            if time.monotonic() - begin > options.budget:
                print(f"no time left for {_name((number, tokens))}", file=sys.stderr)
                continue
            results.append(_case(shape, captured, pool, known, (number, tokens), options.rounds))
            _show(results[-1])
            report.publish(argparse.Namespace(out=options.out, plot=None), "slices", setting, results, [])


def _show(result: Mapping[str, Any]) -> None:
    print(report.table(HEADERS, rows(result)), flush=True)


def _name(case: tuple[int, int]) -> str:
    return f"{case[0]}x{case[1]}"


def _wanted(only: Sequence[str] | None, name: str) -> bool:
    return not only or any(part in name for part in only)


def _captured(size: Size, dtype: str) -> Captured:
    return Setting("llama", size, dtype, masters=True).capture()


def _profile(shape: Shape, captured: Captured, pool: WorkerPool) -> tuple[Known, dict[str, Any]]:
    """What slices take here, and how that is shown."""
    setting = Setting("llama", shape.size, shape.dtype, masters=True)
    plan = _plan(shape.pp, setting, captured)
    found: list[Facts] = pool.run(profile, Case(setting, {WHOLE: plan}, 0), captured, shape.effort, on_event=_say)
    kinds = {name: median_of([getattr(facts, name) for facts in found]) for name in ("first", "layer", "last")}
    fits = {name: fit(kind.slices) for name, kind in kinds.items()}
    times = {name: BlockTimes(fits[name].times, kind.forward) for name, kind in kinds.items()}
    buckets = bucket_names(captured.blocks, captured.trainable).names
    elements = tuple(sum(math.prod(captured.shapes[name]) for name in names) for names in buckets)
    facts = measure(setting.spec(), captured, setting.torch_dtype)
    described = {sliced: describe(captured, Split(sliced=sliced).plan, shape.dtype) for sliced in (False, True)}
    steps, others = [merge(parts) for parts in zip(*(facts.parts for facts in found))], found[0].others
    known = Known(
        (times["first"], *[times["layer"]] * (len(facts.blocks) - 2), times["last"]), found[0].link,
        ends_of(steps, plan, described[False].eager, elements), elements, facts, described,
        RankProfile(transfers=others.transfers, beside=others.beside),
    )  # fmt: skip
    slices = [asdict(measurement) for measurement in kinds["layer"].slices]
    shown = {"fits": {name: _fit(found) for name, found in fits.items()}, "link": asdict(known.link)}
    shown["beside"] = {f"{a} beside {b}": speeds for (a, b), speeds in others.beside.items()}
    shown["transfers"] = {f"{kind} of {ranks}": points for (kind, ranks), points in others.transfers.items()}
    shown["forward"] = {name: kind.forward for name, kind in kinds.items()}
    return known, {**shown, "ends": asdict(known.ends), "layer_slices": slices}


def _fit(found: Fit) -> dict[str, Any]:
    return {**asdict(found.times), "error": found.error, "worst_error": found.worst_error}


def _plan(pp: int, setting: Setting, captured: Captured, more: str = "") -> Plan:
    samples, weights = setting.size.samples, captured.blocks.flops(captured.dims(setting.batch()))
    text = f"pp={pp},mb={samples},schedule=1f1b{more}"
    return complete(text, world=pp, batch_size=samples, costs=weights).plan


def _case(
    shape: Shape, captured: Captured, pool: WorkerPool, known: Known, case: tuple[int, int], rounds: int
) -> dict[str, Any]:
    number, tokens = case
    setting = Setting("llama", replace(shape.size, samples=number, tokens=tokens), shape.dtype, masters=True)
    whole = _plan(shape.pp, setting, captured)
    uniform = {str(n): _plan(shape.pp, setting, captured, f",slices={n}") for n in shape.slicings}
    best = planned(known, whole, tokens, uniform)
    plans = {WHOLE: whole, **uniform, PLANNED: best}
    if number == max(count for count, _ in shape.cases):
        sliced = best if best.slices else uniform[str(shape.slicings[-1])]
        plans |= {EAGER: replace(sliced, schedule="eager-1f1b"), ALL_FIRST: replace(sliced, schedule="gpipe")}
    return _measured(Case(setting, plans, rounds), captured, pool, known)


def _cost(shape: Shape, rounds: int) -> dict[str, Any]:
    """One rank that has its device to itself."""
    setting, captured = Setting("llama", shape.alone, shape.dtype, masters=True), _captured(shape.alone, shape.dtype)
    plans = {WHOLE: _plan(1, setting, captured)}
    plans |= {str(n): _plan(1, setting, captured, f",slices={n}") for n in shape.alone_slicings}
    with _pool(shape, 1) as pool:
        return _measured(Case(setting, plans, rounds, shape.compile), captured, pool, None)


def _measured(case: Case, captured: Captured, pool: WorkerPool, known: Known | None) -> dict[str, Any]:
    """Plans that are the same plan are run once."""
    names = {plan: name for name, plan in reversed(list(case.plans.items()))}
    once = replace(case, plans={name: plan for name, plan in case.plans.items() if names[plan] == name})
    seen: list[Seen] = pool.run(run_case, once, captured, on_event=_say)
    size = case.setting.size
    steps = [_step(name, names[plan], plan, seen, known, size.tokens) for name, plan in case.plans.items()]
    return {"pp": len(seen), "sequences": size.samples, "tokens": size.tokens, "steps": steps}


def _step(name: str, ran_as: str, plan: Plan, seen: Sequence[Seen], known: Known | None, tokens: int) -> dict[str, Any]:
    return {
        "slices": name, "plan": plan.full_text, "same_as": ran_as if ran_as != name else None,
        "simulated": known.step(plan, tokens) if known else None,
        "simulated_memory": known.memory(plan, tokens) if known else None,
        "seconds": report.summary([max(found) for found in zip(*(s.seconds[ran_as] for s in seen))]),
        "memory": [asdict(s.memory[ran_as]) for s in seen], "held": [s.held[ran_as] for s in seen],
    }  # fmt: skip


def speed_up(result: Mapping[str, Any], step: Mapping[str, Any]) -> float:
    return result["steps"][0]["seconds"]["median"] / step["seconds"]["median"]


def peak(step: Mapping[str, Any]) -> int | None:
    """Bytes of the rank that needs most; of a step's own, without what other plans keep on the device."""
    found = [memory["peak"] - memory["before"] for memory in step["memory"] if memory["peak"] is not None]
    return max(found, default=None)


def rows(result: Mapping[str, Any]) -> list[list[str]]:
    """One for each plan, as tables and pages show them."""
    found: list[list[str]] = []
    for step in result["steps"]:
        seconds, simulated = step["seconds"], step["simulated"]
        spread = f"{seconds['median'] * 1e3:.1f} ({seconds['low'] * 1e3:.1f}–{seconds['high'] * 1e3:.1f})"
        found.append([
            str(result["sequences"]), str(result["tokens"]), named(step),
            f"{simulated * 1e3:.1f}" if simulated else "–", spread,
            f"{simulated / seconds['median'] - 1:+.1%}" if simulated else "–",
            f"{speed_up(result, step):.2f}×", _gib(max(step["simulated_memory"] or [0])), _gib(peak(step)),
        ])  # fmt: skip
    return found


def _gib(nbytes: int | None) -> str:
    return f"{nbytes / 2**30:.2f}" if nbytes else "–"


def named(step: Mapping[str, Any]) -> str:
    """The name of a step's slices, with those that a planner chose."""
    lengths = step["plan"].partition("slices=")[2].partition(",")[0].split("-")
    runs = [(length, len(list(run))) for length, run in groupby(lengths)]
    text = "-".join(f"{count}×{length}" if count > 1 else length for length, count in runs)
    return f"{step['slices']} ({text or 'none'})" if step["slices"] in (PLANNED, EAGER, ALL_FIRST) else step["slices"]


def panels(results: Sequence[Mapping[str, Any]]) -> list[plot.Panel]:
    """One for each case."""
    found: list[plot.Panel] = []
    for result in results:
        measured = [plot.Point.of(step["slices"], step["seconds"]) for step in result["steps"]]
        series = {"measured": measured}
        if result["steps"][0]["simulated"] is not None:
            series["simulated"] = [plot.Point(s["slices"], *[s["simulated"]] * 3) for s in result["steps"]]
        title = f"{result['sequences']} × {result['tokens']} tokens, {result['pp']} ranks"
        found.append(plot.Panel(title, "slices", "seconds of a step", series))
    return found


def _say(event: str, text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@contextmanager
def _pool(shape: Shape, size: int) -> Iterator[WorkerPool]:
    if shape is not GPU:
        with WorkerPool(size, threads_per_rank=1, device="cpu") as pool:
            yield pool
    elif size == 1:
        with WorkerPool(1, device="cuda") as pool:
            yield pool
    else:
        with shared_gpu(size), WorkerPool(size, device="cuda", environment=rank_environment) as pool:
            yield pool


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = report.options(__doc__ or "")
    parser.add_argument("--gpu", action="store_true", help="4 ranks that share one GPU, instead of CPU ranks")
    parser.add_argument(
        "--only", action="append", metavar="NAME",
        help="cases whose name (SEQUENCESxTOKENS, or cost) contains this; may be repeated",
    )  # fmt: skip
    parser.add_argument("--rounds", type=int, default=4, help="measured steps of each plan (default: 4)")
    parser.add_argument(
        "--budget", type=float, default=240.0, help="begin no case after so many seconds (default: 240)"
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
