"""What is drawn of a plan's step: a picture of bounded size that fills and drains as the plan does."""

from __future__ import annotations

import pytest

from phalanx.plan.plan import Plan
from phalanx.planning.cluster import Cluster
from phalanx.planning.cost import Software
from phalanx.planning.estimate import estimate
from phalanx.planning.partition import evenly
from phalanx.planning.work import Shape, transformer
from phalanx.predict.sketch import MOST_FORWARDS, shown_plan, shown_words, sketch

MODEL = transformer("model", Shape(126, 1024, 16, 16, 4096, 32000, 1024))


def of(text: str) -> Plan:
    plan = Plan.parse(text)
    return Plan.parse(f"{plan.full_text},stages={'-'.join(map(str, evenly([1.0] * 128, plan.num_stages)))}")


@pytest.mark.parametrize("text", [
    "pp=128,mb=128", "pp=64,mb=16,slices=16,schedule=zb-h1", "pp=16,mb=512,schedule=interleaved,v=4",
    "pp=32,mb=64,schedule=zb-v", "pp=63,mb=200", "pp=8,mb=4,slices=64", "pp=127,mb=1,schedule=gpipe",
])  # fmt: skip
def test_however_long_a_pipeline_is_what_is_drawn_has_few_parts_and_all_its_seconds(text: str) -> None:
    plan = of(text)
    own = estimate(MODEL, plan, Cluster.read(f"{plan.pp}x1 H100"), Software(), plan.mb)
    shown, drawn = shown_plan(plan), sketch(MODEL, own, Software())
    parts = len(shown.slices[0]) if shown.slices else 1
    assert shown.pp <= 16 and shown.num_stages * shown.mb * parts <= 1.1 * MOST_FORWARDS
    assert len(drawn.events) < 12 * MOST_FORWARDS
    words, together = shown_words(plan), -(-plan.pp // shown.pp)
    assert ("in a row" in words) == (together > 1) and words.endswith(
        f"of {plan.mb}" + " micro-batches" * (together == 1)
    )


def test_places_that_stand_together_take_as_long_as_all_of_them() -> None:
    plan = of("pp=64,mb=64")
    own = estimate(MODEL, plan, Cluster.read("64x1 H100"), Software(step=0.0), 64)
    drawn = sketch(MODEL, own, Software(step=0.0))
    assert drawn.makespan == pytest.approx(own.step_seconds - own.parts["optimizer"], rel=0.15)


def test_a_short_pipeline_is_drawn_as_it_is() -> None:
    plan = of("pp=4,mb=16")
    assert shown_plan(plan).pp == 4 and shown_words(plan) == "One pipeline, 8 of 16 micro-batches"
