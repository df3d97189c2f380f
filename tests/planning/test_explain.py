"""What is said about plans follows from estimates."""

from __future__ import annotations

from dataclasses import replace

import pytest

from phalanx.plan.plan import Plan
from phalanx.planning.cluster import Cluster
from phalanx.planning.cost import Machine, Software
from phalanx.planning.estimate import PARTS, estimate
from phalanx.planning.explain import slice_sentence, slice_tokens, what_helps, what_limits, why_lost
from phalanx.planning.search import search
from phalanx.planning.work import Shape, transformer

SHAPES = {
    "small": Shape(12, 1024, 16, 16, 4096, 32000, 8192),
    "wide": Shape(40, 8192, 64, 8, 28672, 128256, 8192, gated=True),
}


def rate(device: str, shape: Shape, tokens: int) -> float:
    """Of what products reach with very many rows: of a slice with so many tokens, weights read."""
    (kind,) = Cluster.read(device).nodes
    made: list[float] = []
    for length in (tokens, 2**24):
        layer = transformer("model", shape._replace(tokens=length)).classes[1]
        made.append(Machine(kind, Software(), Plan(), 1).seconds(layer, "none").weight / length)
    return made[1] / made[0]


@pytest.mark.parametrize("device", ["V100", "A100", "H100"])
def test_the_slice_that_a_device_wants_is_the_same_for_every_model(device: str) -> None:
    (kind,) = Cluster.read(device).nodes
    tokens = slice_tokens(kind, Software())
    for shape in SHAPES.values():
        assert rate(device, shape, tokens) == pytest.approx(2 / 3, abs=0.04)
        assert rate(device, shape, tokens // 2) < 0.55


def test_a_device_with_more_arithmetic_for_its_memory_wants_longer_slices() -> None:
    wanted = {name: slice_tokens(Cluster.read(name).nodes[0], Software()) for name in ("V100", "A100", "H100")}
    assert wanted["V100"] <= wanted["A100"] < wanted["H100"]
    assert f"H100 wants slices of {wanted['H100']} tokens" in slice_sentence(Cluster.read("4x8 H100"), Software())


def test_every_part_of_a_step_has_words() -> None:
    model, cluster = transformer("model", SHAPES["small"]), Cluster.read("2 A100")
    own = estimate(model, Plan(dp=2, stages=(14,)), cluster, Software(), 4)
    for part in PARTS:
        slower = {name: seconds + (own.step_seconds if name == part else 0.0) for name, seconds in own.parts.items()}
        other = type(own)(**{**vars(own), "parts": slower, "step_seconds": 2 * own.step_seconds})
        assert "slower: " in why_lost(own, other) and "nothing stands out" not in why_lost(own, other)
        assert "of a step is computation" in what_limits(other)


def test_a_plan_that_does_not_fit_loses_by_that_and_one_that_is_faster_is_not_slower() -> None:
    model, cluster = transformer("model", SHAPES["wide"]), Cluster.read("8 H100")
    whole = Plan(tp=8, mb=8, stages=(42,), sequence=True)
    lean = replace(whole, recompute=("block",), offload=(("optimizer", 1.0),))
    fits, large = (estimate(model, own, cluster, Software(), 8) for own in (lean, whole))
    assert fits.fits and not large.fits and large.step_seconds < fits.step_seconds
    words = why_lost(fits, large)
    assert words.startswith("does not fit: ") and "GiB too much at place 0 of the pipeline; " in words
    assert words.endswith("% faster if it did") and "-" not in words
    roomy = estimate(model, large.plan, Cluster.read("8 H100, memory 800GB"), Software(), 8)
    words = why_lost(fits, roomy)
    assert "% faster: " in words and "computing activations again -" in words and "+" not in words


def test_slices_are_told_of_every_kind_of_device() -> None:
    words = slice_sentence(Cluster.read("8 H100 + 8 T4"), Software())
    for name in ("H100", "T4"):
        assert f"{name} wants slices of {slice_tokens(Cluster.read(name).nodes[0], Software())} tokens" in words


def test_what_would_help_is_worth_a_word_and_at_most_what_a_search_finds() -> None:
    model, cluster = transformer("model", SHAPES["wide"]), Cluster.read("2x8 H100, network 20Gb/s")
    found = search(model, cluster, Software(), 64)
    helps = what_helps(model, cluster, Software(), found)
    assert [help.speedup for help in helps] == sorted((help.speedup for help in helps), reverse=True)
    assert helps[0].speedup > 1.03 and {"twice the nodes", "twice the memory"} & {help.what for help in helps}
    more = Cluster.read("4x8 H100, network 20Gb/s")
    best = search(model, more, Software(), 64, all_devices=True).plans[0]
    speedups = {help.what: help.speedup for help in helps}
    assert speedups.get("twice the nodes", 1.0) <= 1.02 * found.plans[0].step_seconds / best.step_seconds
