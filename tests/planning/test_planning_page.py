"""The worked example of docs/planning.md: every figure of its table is computed again."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from phalanx.model.facts.facts import load
from phalanx.plan.plan import Plan
from phalanx.planning.cluster import Cluster
from phalanx.planning.cost import Software, machines
from phalanx.planning.estimate import estimate
from phalanx.predict.work_of_facts import work_of_facts

PAGE = Path(__file__).parents[2] / "docs" / "planning.md"
PLAN = Plan.parse("pp=2,tp=4,mb=8,stages=17-17,sequence=yes")


def table() -> dict[str, tuple[str, list[float]]]:
    """Of each row its formula, and the figures of its last column."""
    text = PAGE.read_text("utf-8").partition("## One step by hand")[2].partition("## The search")[0]
    rows = re.findall(r"^\| ([^|]+) \|([^|]*)\| ([^|]+) \|$", text, re.M)
    return {name: (how, [float(x) for x in re.findall(r"[\d.]+", value)]) for name, how, value in rows}


def test_the_worked_example_is_what_is_computed() -> None:
    facts = load("meta-llama/Meta-Llama-3-8B")
    assert facts is not None
    model, rows = work_of_facts(facts, {"batch": 1, "tokens": 4096}), table()
    embedding, layer, head = model.classes
    machine = machines(Cluster.read("8 H100"), Software(), PLAN, 1)[0]
    own = machine.seconds(layer, "none")
    whole = estimate(model, PLAN, Cluster.read("8 H100"), Software(), 8)
    by_hand = {
        "products of a layer, forward": [1.787e12 / 4 / (989.4e12 * 0.72) * (1 + 180 * (1 / 2611 + 1 / 4096))],
        "attention": [0.1374e12 / 4 / (989.4e12 * 0.45)],
        "element-wise work": [571.0e6 / 4 / (3350e9 * 0.8)],
        "reading weights": [2 * 218.1e6 / 4 / (3350e9 * 0.8)],
        "one sum of 33.55 MB over 4 ranks": [2 * (3 / 4 * 33.55e6 / (450e9 * 0.75) + 2 * 4e-6)],
        "started by the host": [2 * 60e-6 + 2 * 20e-6],
        "forward of a layer": [own.forward],
        "its input gradients": [own.backward],
        "its weight gradients": [own.weight],
        "a layer": [own.total],
        "embedding, head": [machine.seconds(embedding, "none").total, machine.seconds(head, "none").total],
        "place 1 of the pipeline": [16 * own.total + machine.seconds(head, "none").total],
        "a step": [whole.step_seconds],
    }
    assert set(by_hand) == set(rows)
    for name, seconds in by_hand.items():
        assert [1000 * own for own in seconds] == pytest.approx(rows[name][1], rel=0.01), name
    assert layer.products / 1e12 == pytest.approx(1.787, rel=1e-3)
    assert layer.attention / 1e12 == pytest.approx(0.1374, rel=1e-3)
    assert layer.moved.alone / 1e6 == pytest.approx(571.0, rel=1e-3)
    assert math.sqrt(layer.parameters / 2) / 4 == pytest.approx(2611, rel=1e-3)
    first = ("products of a layer, forward", "attention", "element-wise work", "reading weights")
    busy = sum(by_hand[name][0] for name in first) + 2 * by_hand["one sum of 33.55 MB over 4 ranks"][0]
    assert (busy**2.5 + by_hand["started by the host"][0] ** 2.5) ** 0.4 == pytest.approx(own.forward, rel=1e-3)
    assert layer.crossing / 1e6 == pytest.approx(33.55, rel=1e-3)
    parts = [8 * by_hand["place 1 of the pipeline"][0], whole.parts["bubble"] + whole.parts["messages"]]
    parts += [whole.parts["optimizer"], whole.parts["other"]]
    shown = [float(x) for x in re.findall(r"[\d.]+(?= \(| ms| \+)", rows["a step"][0])]
    assert [1000 * part for part in parts] == pytest.approx([8 * shown[0], *shown[1:]], rel=0.01)
    assert sum(parts) == pytest.approx(whole.step_seconds, rel=1e-6)
