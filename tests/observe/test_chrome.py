"""Chrome traces of timelines: complete events on named threads, and an arrow for each message."""

from __future__ import annotations

import json
from typing import Any

from phalanx.observe.program_files import chrome_trace
from phalanx.plan.plan import Plan
from phalanx.predict.costs import uniform
from phalanx.predict.simulate import simulate
from phalanx.program.compile import compile_plan
from phalanx.program.shape import ModelShape

PLAN = Plan(pp=2, mb=2, stages=(1, 1))
SHAPE = ModelShape(2, (), (True, True), (True, True))
TIMELINE = simulate(compile_plan(PLAN, SHAPE), uniform(SHAPE, send=0.5))


def events(kind: str, *names: str) -> list[dict[str, Any]]:
    trace = json.loads(chrome_trace(dict.fromkeys(names or ("predicted",), TIMELINE)))
    return [event for event in trace["traceEvents"] if event["ph"] == kind]


def test_every_event_is_there_in_microseconds_with_its_place():
    complete = events("X")
    assert len(complete) == len(TIMELINE.events)
    (forward,) = [event for event in complete if event["name"] == "F1.0/1"]
    assert (forward["pid"], forward["ts"], forward["dur"]) == (1, 1.5e6, 1e6)
    assert forward["args"] == {"stage": 1, "micro_batch": 0, "block": 1}


def test_ranks_and_resources_are_named_with_the_computation_on_top():
    names = {(e["name"], e["pid"], e.get("tid")): e["args"].get("name") for e in events("M")}
    assert names["process_name", 1, None] == "predicted rank 1"
    assert names["thread_name", 0, 0] == names["thread_name", 1, 0] == "compute"
    assert {name for (kind, pid, _), name in names.items() if kind == "thread_name" and pid == 0} == {
        "compute", "0→1 F", "1→0 B", "ranks 0,1",
    }  # fmt: skip


def test_an_arrow_leads_from_each_send_to_its_receive():
    leaves, arrives = ({event["id"]: event["pid"] for event in events(kind)} for kind in "sf")
    assert leaves.keys() == arrives.keys() and len(leaves) == 4
    assert all({leaves[message], arrives[message]} == {0, 1} for message in leaves)


def test_two_timelines_are_different_processes_with_arrows_of_their_own():
    complete = events("X", "predicted", "measured")
    assert {event["pid"] for event in complete} == {0, 1, 2, 3}
    assert len({event["id"] for event in events("s", "predicted", "measured")}) == 8
