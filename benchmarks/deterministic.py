"""What exact sums and slots of fixed size cost: a step of a deterministic run beside the same step without.

    python benchmarks/deterministic.py [--quick] [--repeats 5] [--out deterministic.json]

CPU ranks of one thread each train a Llama in float32 under one plan three times, in turn: `free` with one micro-batch;
`slots` with micro-batches of the slot's size and sums as they come; `deterministic`, the same with exact sums. So
slots / free is what small micro-batches cost, and deterministic / slots what exact sums cost. Seconds are processor
time of the busiest rank, which other work on the machine changes least; the median counts.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import plot
import report
from compare_setting import Setting, Size
from migrate_ranks import LR, Case, _opening, _read

from phalanx.launch.context import RankContext
from phalanx.launch.worker_pool import WorkerPool
from phalanx.plan.complete import complete
from phalanx.plan.plan import Plan
from phalanx.session.change import change, open_member
from phalanx.session.session import Session
from phalanx.session.spare import Member

SAMPLES, LAYERS, WIDTH = 16, 4, 512
CASES = (("dp=1", 1, 128), ("dp=1", 4, 128), ("dp=1", 1, 512), ("dp=2", 1, 512), ("dp=2,zero=2", 1, 512))
KINDS = ("free", "slots", "deterministic")
HEADERS = ["plan", "tokens of a sample", "samples of a slot", *(f"{kind} s" for kind in KINDS), "slots / free",
           "deterministic / slots"]  # fmt: skip


@dataclass(frozen=True)
class Timed:
    """Seconds of each step, by kind."""

    seconds: dict[str, list[float]]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = report.options(__doc__ or "")
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="of each step; the median counts")
    parser.add_argument("--quick", action="store_true", help="one case, a small model and one repeat")
    options = parser.parse_args(arguments)
    cases, repeats, width = (CASES[:1], 1, 64) if options.quick else (CASES, options.repeats, WIDTH)
    with WorkerPool(2, threads_per_rank=1, device="cpu") as pool:
        results = [measured(pool, plan, slot, tokens, width, repeats) for plan, slot, tokens in cases]
    print(report.table(HEADERS, [row(result) for result in results]))
    setting = {"samples": SAMPLES, "layers": LAYERS, "width": width, "repeats": repeats}
    report.publish(options, "deterministic", setting, results, panels(results))


def measured(pool: WorkerPool, plan: str, slot: int, tokens: int, width: int, repeats: int) -> dict[str, Any]:
    size = Size(layers=LAYERS, width=width, vocabulary=4 * width, samples=SAMPLES, tokens=tokens)
    setting = Setting("llama", size, "float32", masters=False)
    captured, batch = setting.capture(), setting.batch()
    costs = captured.blocks.flops(captured.dims(batch))

    def completed(text: str, slot: int | None = None) -> Plan:
        return complete(text, world=None, batch_size=SAMPLES, costs=costs, slot=slot).plan

    exact = completed(plan, slot)
    plans = dict(zip(KINDS, (completed(plan), completed(f"{plan},mb={exact.mb}"), exact), strict=True))
    case = Case(captured, batch, plans["free"], exact, repeats, Path())
    found: list[Timed] = pool.run(time_steps, case, plans, world=exact.world)
    slowest = {kind: [max(times) for times in zip(*(each.seconds[kind] for each in found), strict=True)]
               for kind in KINDS}  # fmt: skip
    print(f"{plan}: slots of {slot} × {tokens} tokens", file=sys.stderr)
    return {"plan": plan, "slot": slot, "tokens": tokens, **{kind: report.summary(slowest[kind]) for kind in KINDS}}


def time_steps(context: RankContext, case: Case, plans: Mapping[str, Plan]) -> Timed:
    member = open_member(_opening(context, case), case.old, _read(case.captured))
    seconds: dict[str, list[float]] = {kind: [] for kind in plans}
    for number in range(case.repeats + 1):
        for kind, plan in plans.items():
            member, _ = change(member, plan)
            _seconds(member, case)  # what is made for the first step is no part of it
            own = _seconds(member, case)
            if number:
                seconds[kind].append(own)
    member.close()
    return Timed(seconds)


def _seconds(member: Member, case: Case) -> float:
    assert isinstance(member, Session)
    first, count = member.part(0, SAMPLES)
    batch = {name: tensor[first : first + count] for name, tensor in case.batch.items()}
    began = time.process_time()
    member.step(batch, first, LR).read()
    return time.process_time() - began


def row(result: Mapping[str, Any]) -> list[str]:
    free, slots, exact = (result[kind]["median"] for kind in KINDS)
    times = [f"{seconds:.3f}" for seconds in (free, slots, exact)]
    return [result["plan"], str(result["tokens"]), str(result["slot"]), *times, f"{slots / free:.2f}",
            f"{exact / slots:.2f}"]  # fmt: skip


def panels(results: Sequence[Mapping[str, Any]]) -> list[plot.Panel]:
    found: dict[str, list[plot.Point]] = {kind: [] for kind in KINDS}
    for each in results:
        name = f"{each['plan']}, slots of {each['slot']} × {each['tokens']}"
        for kind in KINDS:
            found[kind].append(plot.Point.of(name, each[kind]))
    return [plot.Panel("a step of a deterministic run", "plan and slot", "seconds of processor time", found)]


if __name__ == "__main__":
    main()
