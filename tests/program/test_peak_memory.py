"""Predicted memory: what is always held under each ZeRO stage, and what comes and goes during a step."""

from __future__ import annotations

from dataclasses import replace

import pytest

from phalanx.plan.plan import Plan
from phalanx.program.costs import BucketCosts, Costs, Link, uniform
from phalanx.program.instructions import Op
from phalanx.program.lower import lower
from phalanx.program.shape import ModelShape
from phalanx.program.simulate import simulate

BUCKET = BucketCosts(weight_bytes=1000, gradient_bytes=2000, optimizer_bytes=6000)


def shape_of(num_blocks: int) -> ModelShape:
    return ModelShape(num_blocks, (), (True,) * num_blocks, (True,) * num_blocks)


def memory(plan: Plan, rank: int = 0, **changes: object) -> dict[str, int]:
    shape = shape_of(sum(plan.stages))
    costs: Costs = replace(uniform(shape), buckets=(BUCKET,) * shape.num_blocks, **changes)  # pyright: ignore
    timeline = simulate(plan, shape, lower(plan, shape), costs)
    assert timeline.peak_memory(rank) == sum(timeline.memory[rank].values())
    return dict(timeline.memory[rank])


@pytest.mark.parametrize(
    ("zero", "weights", "gradients", "optimizer"),
    [
        (0, 3000, 6000, 18000),
        (1, 3000, 6000, 9000),
        (2, 3000, 3000 + 2000, 9000),  # a half of all, and one bucket that is not reduced yet
        (3, 1500 + 2000, 3000 + 2000, 9000),  # the same of weights, and two buckets that are gathered
    ],
)
def test_zero_shards_optimizer_state_then_gradients_then_weights(
    zero: int, weights: int, gradients: int, optimizer: int
):
    held = memory(Plan(dp=2, zero=zero, stages=(3,)))
    assert (held["weights"], held["gradients"], held["optimizer"]) == (weights, gradients, optimizer)


def test_activations_of_1f1b_are_as_many_micro_batches_as_stages_are_left():
    plan = Plan(pp=4, mb=8, stages=(1,) * 4)
    assert [memory(plan, rank)["activations"] for rank in range(4)] == [4, 3, 2, 1]


def test_gpipe_keeps_every_micro_batch():
    assert memory(Plan(pp=2, mb=8, schedule="gpipe", stages=(1, 1)), 1)["activations"] == 8


def test_recomputation_keeps_inputs_and_rebuilds_one_block_at_a_time():
    held = memory(Plan(mb=2, schedule="gpipe", stages=(3,)), saved_bytes=(10,) * 3, rebuilt_bytes=(500,) * 3)
    assert held["activations"] == 2 * 3 * 10 + 500


def test_messages_hold_buffers_while_they_are_on_their_way():
    plan = Plan(pp=2, mb=1, stages=(1, 1))
    assert memory(plan, 1, cut_bytes=(64, 0), message_link=Link(1.0))["buffers"] == 64
    # Rank 0 has asked for the gradients before its outputs are gone.
    assert memory(plan, 0, cut_bytes=(64, 0), message_link=Link(1.0))["buffers"] == 128


def test_frozen_buckets_have_neither_gradients_nor_optimizer_state():
    plan, shape = Plan(stages=(2,)), replace(shape_of(2), trained=(False, True))
    timeline = simulate(plan, shape, lower(plan, shape), replace(uniform(shape), buckets=(BUCKET,) * 2))
    held = timeline.memory[0]
    assert (held["weights"], held["gradients"], held["optimizer"]) == (2000, 2000, 6000)


def test_what_a_computation_needs_while_it_runs_comes_and_goes():
    plan = Plan(pp=2, mb=4, stages=(1, 1))
    held = memory(plan, working_bytes={Op.F: (70, 70), Op.BW: (300, 300)})
    assert held["working"] == 300 and held["activations"] == 2
    assert "working" not in memory(plan)
    sliced = Plan.parse("pp=2,mb=2,slices=2,stages=1-1")
    assert memory(sliced, dims={"tokens": 8}, working_bytes={Op.BW: (300, 300)})["working"] == 150
