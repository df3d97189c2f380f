"""Timelines of slices: as bars, as text and as a Chrome trace."""

from __future__ import annotations

import json
from dataclasses import replace

from phalanx.observe.program_files import chrome_trace
from phalanx.observe.program_text import bars_of, chart
from phalanx.plan.plan import Plan
from phalanx.predict.costs import uniform
from phalanx.predict.simulate import simulate
from phalanx.predict.timeline import Timeline
from phalanx.program.compile import compile_plan
from phalanx.program.shape import ModelShape


def simulated(text: str) -> Timeline:
    plan = Plan.parse(text)
    everything = (True,) * sum(plan.stages)
    shape = ModelShape(len(everything), (), everything, everything)
    costs = replace(uniform(shape, f=4.0, b=4.0, w=4.0, send=0.1), dims={"tokens": 64})
    return simulate(compile_plan(plan, shape), costs)


def test_each_slice_is_a_bar_that_names_it() -> None:
    bars = [bar for bar in bars_of(simulated("slices=3-1,stages=2")) if bar.lane == "compute"]
    assert [(bar.title, bar.label, bar.end - bar.start) for bar in bars] == [
        ("F0.0.0", "0.0", 6), ("F0.0.1", "0.1", 2), ("BW0.0.1", "0.1", 4), ("BW0.0.0", "0.0", 12),
    ]  # fmt: skip


def test_the_chart_names_slices() -> None:
    timeline = simulated("pp=2,slices=2,stages=1-1")
    first, second, *_ = (line.plain for line in chart(timeline, timeline.ranks, 100))
    assert first.startswith("rank 0 F0.0") and "F0.1" in first and first.index("B0.1") < first.index("B0.0")
    assert second.startswith("rank 1 ·") and "B0.1" in second


def test_the_messages_of_each_slice_have_an_arrow_of_their_own() -> None:
    trace = json.loads(chrome_trace({"predicted": simulated("pp=2,mb=2,slices=3,stages=1-1")}))["traceEvents"]
    leaves, arrives = ({event["id"] for event in trace if event["ph"] == kind} for kind in "sf")
    assert leaves == arrives and len(leaves) == 2 * 2 * 3
    (forward,) = [event for event in trace if event.get("name") == "F1.0.2/1"]
    assert forward["args"] == {"stage": 1, "micro_batch": 0, "slice": 2, "block": 1}
