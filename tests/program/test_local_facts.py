"""Costs of a split model from what one of its ranks computes and keeps."""

from __future__ import annotations

from dataclasses import replace

import pytest

from phalanx.plan.plan import Plan
from phalanx.program.costs import Link
from phalanx.program.from_facts import Device
from phalanx.program.local_facts import LocalBlock, LocalFacts, costs_of_local
from phalanx.program.shape import ModelShape, Step

CELLS = ((0, 1),)
PLAN = Plan(tp=2, stages=(2,))


def steps(before: str, after: str, gathers: bool = False) -> tuple[Step, ...]:
    """A unit between `before` and `after`: spread (or gathered), computed, summed; then the residual addition."""
    collectives = ("all_gather", "reduce_scatter") if gathers else ("", "all_reduce")
    return (
        Step("exchange", (before,), (f"{after}.in",), 2, "u", *collectives, cells=CELLS),
        Step("segment", (f"{after}.in",), (f"{after}.part",), 2, "u", flops="100"),
        Step("exchange", (f"{after}.part",), (f"{after}.sum",), 2, "u", "all_reduce", "", cells=CELLS),
        Step("segment", (before, f"{after}.sum"), (after,), 2, "u", flops="1"),
    )


def facts(gathers: bool = False) -> LocalFacts:
    wires = {"x": 10, "y.in": 20, "y.part": 40, "y.sum": 80, "y": 10, "z.in": 20, "z.part": 40, "z.sum": 80, "z": 10}
    shape = ModelShape(
        2, (), (True, True), (True, True), (steps("x", "y", gathers), steps("y", "z", gathers)), ((), ())
    )
    blocks = (
        LocalBlock(100, 5, 1000, {"mask": 3, "x": 10, "y.in": 20}, ("y",)),
        LocalBlock(300, 7, 1000, {"mask": 3, "y": 10, "z.in": 20}, ()),
    )
    return LocalFacts("bfloat16", {"batch": 2}, shape, blocks, (5, 7), wires)


def test_a_block_takes_its_arithmetic_or_its_writing_whichever_is_longer() -> None:
    assert facts().seconds(Device(10.0, 1e9)) == (10.0, 30.0)
    assert facts().seconds(Device(1e9, 1033.0)) == (1.0, 1.0)


def test_costs_are_those_of_the_rank_on_the_assumed_device() -> None:
    link = Link(0.5, 1000.0)
    costs = costs_of_local(facts(), PLAN, Device(10.0, 1e9, link))
    assert costs.forward == costs.backward == costs.weight == (10.0, 30.0)
    assert costs.cut_bytes == (10, 0)
    assert [bucket.weight_bytes for bucket in costs.buckets] == [10, 14]
    assert (costs.dims, costs.element_bytes, costs.group((0, 1))) == ({"batch": 2}, 2, link)


def test_what_blocks_of_a_stage_share_is_kept_once() -> None:
    assert costs_of_local(facts(), PLAN, Device()).saved_bytes == (1033, 1030)
    apart = Plan(tp=2, pp=2, mb=2, stages=(1, 1))
    assert costs_of_local(facts(), apart, Device()).saved_bytes == (1033, 1033)


@pytest.mark.parametrize(("overlap", "kept"), [("default_checkpoint", 10), ("oases", 10 + 80)])
def test_what_is_computed_again_keeps_what_its_portions_begin_with(overlap: str, kept: int) -> None:
    plan = replace(PLAN, overlap=overlap)
    costs = costs_of_local(facts(), plan, Device())
    # A block begins with its input; with units, the results of sums are kept besides.
    assert costs.saved_bytes == (kept, kept)
    assert [a + b for a, b in zip(costs.saved_bytes, costs.rebuilt_bytes, strict=True)] == [1033, 1030]


def test_a_gathered_input_is_kept_or_gathered_again() -> None:
    plan = replace(PLAN, sequence=True)
    assert costs_of_local(facts(gathers=True), plan, Device()).saved_bytes == (1033, 1030)
    again = costs_of_local(facts(gathers=True), replace(plan, save="input"), Device())
    assert again.saved_bytes == (1013, 1010) and again.rebuilt_bytes == (20, 20)
