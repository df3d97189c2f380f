"""How long it takes to plan a change of formation: the layouts of both plans, and which boxes move between which ranks.

    python benchmarks/state_moves.py [--repeats 5] [--out state_moves.json]

Nothing is moved and no model is built: a decoder's parameters are described, with masters, Adam's averages and
counters, about 1,000 tensors. Every rank plans the same by itself, so what is shown is what each takes, in processor
time.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import plot
import report

from phalanx.params.layout_of import StateLayout
from phalanx.params.state_facts import ParameterFacts, Slot, StateFacts
from phalanx.plan.plan import Plan
from phalanx.program.compile import without_collection
from phalanx.state.layout import Layout
from phalanx.state.local import Local
from phalanx.state.moves import Move, plan_moves

RESULTS = Path(__file__).parent.parent / "docs" / "results"
INTRO = """# How long it takes to plan what moves when the plan changes

Of a decoder with about 1,000 tensors (masters, averages and counters counted) every rank works out, for both plans,
which boxes of which tensors lie on which rank (*layouts*) and which of them go from whom to whom (*moves*). Nothing is
moved. The seconds are processor time of one rank.
"""
LAYERS, WIDTH, VOCABULARY = 31, 1024, 32_003
ADAM = (Slot("step", "float32", is_counter=True), Slot("exp_avg", "float32"), Slot("exp_avg_sq", "float32"))
LAYER = {  # shape, and the dim along which tensor-parallel ranks split it
    "norm1": ((WIDTH,), None), "qkv": ((3 * WIDTH, WIDTH), 0), "qkv.bias": ((3 * WIDTH,), 0),
    "out": ((WIDTH, WIDTH), 1), "norm2": ((WIDTH,), None), "up": ((4 * WIDTH, WIDTH), 0),
    "up.bias": ((4 * WIDTH,), 0), "down": ((WIDTH, 4 * WIDTH), 1),
}  # fmt: skip
CHANGES = (
    ("dp=8,zero=1", "pp=2,dp=4,zero=1"),
    ("pp=2,dp=2,tp=2,zero=3", "dp=8,zero=3"),
    ("dp=64", "pp=4,dp=16"),
    ("dp=64,zero=1", "pp=4,dp=16,zero=1"),
    ("pp=4,dp=4,tp=4,zero=3", "pp=2,dp=32,zero=3"),
    ("pp=8,tp=8", "dp=64,zero=3"),
)
HEADERS = ["ranks", "from", "to", "tensors", "shards", "moves", "layouts s", "moves s"]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = report.options(__doc__ or "")
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="of each change; the median counts")
    options = parser.parse_args(arguments)
    results = [measure(old, new, options.repeats) for old, new in CHANGES]
    print(report.table(HEADERS, [row(result) for result in results]))
    report.publish(options, "state_moves", {"repeats": options.repeats}, results, panels(results))


def measure(old: str, new: str, repeats: int) -> dict[str, Any]:
    plans = [staged(Plan.parse(text)) for text in (old, new)]
    facts = [decoder(plan.tp) for plan in plans]
    layouts, building = _timed(lambda: [StateLayout(p, f).all_state() for p, f in zip(plans, facts)], repeats)
    moves, planning = _timed(lambda: _planned(*layouts), repeats)
    return {
        "ranks": plans[0].world, "old": old, "new": new, "tensors": len(_names(layouts[0])),
        "shards": sum(len(shards) for layout in layouts for shards in layout.values()), "moves": len(moves),
        "layout_seconds": building, "move_seconds": planning,
    }  # fmt: skip


def _planned(old: Layout, new: Layout) -> list[Move]:
    """As a change of plan does it."""
    with without_collection():
        return plan_moves(old, new)


def decoder(tp: int) -> StateFacts:
    """A description of a decoder's parameters, in bfloat16 with masters, trained by Adam."""
    shapes: dict[str, tuple[tuple[tuple[int, ...], int | None], int]] = {"embed": (((VOCABULARY, WIDTH), 0), 0)}
    for layer in range(LAYERS):
        shapes |= {f"layers.{layer}.{name}": (kind, layer + 1) for name, kind in LAYER.items()}
    shapes["norm"] = (((WIDTH,), None), LAYERS + 1)
    parameters = tuple(
        ParameterFacts(name, shape, bucket, locals=_split(shape, dim, tp))
        for name, ((shape, dim), bucket) in shapes.items()
    )
    return StateFacts(LAYERS + 2, (), parameters, "bfloat16", tp, masters=True, slots=ADAM)


def _split(shape: tuple[int, ...], dim: int | None, tp: int) -> tuple[Local, ...]:
    if dim is None or tp == 1:
        return ()
    edges = [shape[dim] * index // tp for index in range(tp + 1)]
    return tuple(Local(shape, dim, (part,)) for part in pairwise(edges))


def staged(plan: Plan) -> Plan:
    """With blocks shared out evenly."""
    edges = [(LAYERS + 2) * stage // plan.num_stages for stage in range(plan.num_stages + 1)]
    return replace(plan, stages=tuple(stop - start for start, stop in pairwise(edges)))


def _timed(action: Callable[[], Any], repeats: int) -> tuple[Any, dict[str, float]]:
    seconds: list[float] = []
    result = None
    for _ in range(repeats):
        result = None
        gc.collect()
        begin = time.process_time()
        result = action()
        seconds.append(time.process_time() - begin)
    return result, report.summary(seconds)


def _names(layout: Layout) -> set[str]:
    return {shard.name for shards in layout.values() for shard in shards}


def row(result: Mapping[str, Any]) -> list[str]:
    counts = [f"{result[name]:,}" for name in ("tensors", "shards", "moves")]
    times = [f"{result[name]['median']:.2f}" for name in ("layout_seconds", "move_seconds")]
    return [str(result["ranks"]), result["old"], result["new"], *counts, *times]


def page(folder: Path = RESULTS) -> str:
    """The whole page, from the result file."""
    return report.page(INTRO, folder / "state_moves.json", "repeats", HEADERS, row)


def panels(results: Sequence[Mapping[str, Any]]) -> list[plot.Panel]:
    points = [plot.Point.of(f"{r['old']} → {r['new']}", r["move_seconds"]) for r in results]
    return [plot.Panel("moves of about 1,000 tensors", "change of formation", "seconds", {"planning": points})]


if __name__ == "__main__":
    main()
