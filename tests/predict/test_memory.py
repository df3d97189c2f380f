"""Memory: how many bytes each value has, what lives after each instruction, and what a rank holds at most."""

from __future__ import annotations

from dataclasses import replace

import pytest

from phalanx.plan.plan import Plan
from phalanx.predict.costs import BucketCosts, Costs, Link, uniform
from phalanx.predict.memory import Sizes, resident_bytes
from phalanx.predict.simulate import simulate
from phalanx.program.compile import CompiledPlan, compile_forward, compile_plan
from phalanx.program.shape import Backward, BlockOp, ModelShape
from phalanx.program.values import Value
from tests.program.lives import live_bytes
from tests.program.random_plans import chain, simple_shape
from tests.program.sliced_plans import grains
from tests.program.tensor_shapes import segment

BUCKET = BucketCosts(weight_bytes=1000, gradient_bytes=2000, master_bytes=2000, moment_bytes=4000)


def costs_of(shape: ModelShape, /, **changes: object) -> Costs:
    return replace(uniform(shape), buckets=(BUCKET,) * shape.num_buckets, **changes)  # pyright: ignore


def live(text: str, shape: ModelShape, **changes: object) -> dict[str, int]:
    """Bytes after each instruction of the first rank."""
    compiled = compile_plan(Plan.parse(text), shape)
    found = live_bytes(compiled.tables[0], Sizes.of(compiled, costs_of(shape, **changes)))
    return dict(zip(map(str, compiled.programs[0]), found, strict=True))


def memory(plan: Plan, rank: int = 0, shape: ModelShape | None = None, **changes: object) -> dict[str, int]:
    """What a rank holds at its peak."""
    shape = shape or simple_shape(sum(plan.stages))
    timeline = simulate(compile_plan(plan, shape), costs_of(shape, **changes))
    assert timeline.peak_memory(rank) == sum(timeline.memory[rank].values())
    return dict(timeline.memory[rank])


def value_of(compiled: CompiledPlan, name: str, index: int = 0) -> Value:
    return next(value for value in compiled.tables[index].values if str(value) == name)


# Bytes of single values.


def sizes_of(text: str, shape: ModelShape, dims: dict[str, int]) -> tuple[CompiledPlan, Sizes]:
    compiled = compile_plan(Plan.parse(text), shape)
    return compiled, Sizes.of(compiled, costs_of(shape, dims=dims))


def test_sizes_are_expressions_over_the_dims_of_a_micro_batch() -> None:
    shape = chain(2, "batch * tokens * 8", saved="batch * 3 + 1", inputs="batch * tokens")
    compiled, size = sizes_of("stages=2", shape, {"batch": 4, "tokens": 16})
    assert size(value_of(compiled, "activation(h1).0")) == size(value_of(compiled, "gradient(h1).0")) == 512
    assert size(value_of(compiled, "saved_bw(1:0).0")) == 13
    assert size(value_of(compiled, "inputs().0")) == 64
    assert size(value_of(compiled, "items()")) == size(value_of(compiled, "norm()")) == 0


def test_a_half_has_the_larger_part_of_the_samples() -> None:
    steps = ((segment("", "x"), segment("x", "h1")),)
    sized = tuple(tuple(replace(step, sizes=("batch * 10",)) for step in own) for own in steps)
    shape = replace(simple_shape(1), ops=sized, inputs="batch")
    compiled, size = sizes_of("tp=2,overlap=halves,stages=1", shape, {"batch": 5})
    assert [size(value_of(compiled, f"activation(x).0{half}")) for half in "ab"] == [30, 30]
    assert size(value_of(compiled, "inputs().0b")) == 3


def test_a_slice_has_its_tokens_and_may_depend_on_all_of_them() -> None:
    shape = chain(2, "tokens * 2", saved="tokens * whole_tokens", inputs="whole_tokens + tokens")
    compiled, size = sizes_of("slices=3-1,stages=2", shape, {"batch": 2, "tokens": 16})
    assert [size(value_of(compiled, f"activation(h1).0.{j}")) for j in (0, 1)] == [24, 8]
    assert [size(value_of(compiled, f"saved_bw(0:0).0.{j}")) for j in (0, 1)] == [12 * 16, 4 * 16]
    assert size(value_of(compiled, "inputs().0")) == 32


def test_micro_batches_may_be_cut_differently() -> None:
    compiled, size = sizes_of("mb=2,slices=2/1,stages=2", chain(2, "tokens"), {"tokens": 16})
    assert [size(value_of(compiled, f"activation(h1).{name}")) for name in ("0.0", "0.1", "1.0")] == [8, 8, 16]


def test_what_belongs_to_the_micro_batch_has_all_tokens() -> None:
    shape = replace(chain(2, "tokens"), granularities=grains(1, 2), per_micro_batch=frozenset(("h1",)))
    compiled, size = sizes_of("slices=4,stages=2", shape, {"tokens": 16})
    assert size(value_of(compiled, "activation(h1).0")) == 16


@pytest.mark.parametrize(("width", "wider"), [(2, 2), (4, 1), (8, 1)])
def test_gradients_of_the_past_are_at_least_four_bytes_wide(width: int, wider: int) -> None:
    steps = tuple((replace(own[0], pasts=1, past_bytes="whole_tokens * 10"),) for own in chain(2, "1").ops)
    compiled = compile_plan(Plan.parse("slices=3-1,stages=2"), replace(chain(2, "1"), ops=steps))
    size = Sizes.of(compiled, costs_of(compiled.shape, dims={"tokens": 16}, element_bytes=width))
    assert size(value_of(compiled, "past(1:0).0")) == 160
    assert size(value_of(compiled, "d_past(1:0).0")) == 160 * wider


@pytest.mark.parametrize("zero, reduced", [(0, 2000), (1, 500), (2, 500), (3, 500)])
def test_buckets_have_whole_gradients_and_sums_are_sharded_with_zero(zero: int, reduced: int) -> None:
    plan, shape = Plan(dp=4, zero=zero, stages=(2,)), simple_shape(2)
    compiled = compile_plan(plan, shape)
    size = Sizes.of(compiled, costs_of(shape))
    assert size(value_of(compiled, "d_parameters(1)")) == 2000
    assert size(value_of(compiled, "reduced(1).0")) == reduced
    if zero == 3:
        assert size(value_of(compiled, "gathered(1)")) == 1000


def test_the_segments_of_a_block_share_its_gradients() -> None:
    shape = replace(simple_shape(1), ops=((segment("", "x"), segment("x", "h1")),))
    compiled, size = sizes_of("stages=1", shape, {})
    assert [size(value_of(compiled, f"d_parameters(0/{step})")) for step in (0, 1)] == [1000, 1000]


# What lives after each instruction.


def test_values_live_from_their_writer_to_their_last_reader() -> None:
    assert live("stages=2", chain(2, "10", saved="100", inputs="7")) == {
        "COUNT": 0,
        "I.0": 7,
        "F0.0/0": 7 + 10 + 100,
        "F0.0/1": 10 + 100 + 10 + 100,  # the loss too; the inputs are needed no more
        "BW0.0/1": 100 + 10 + 10 + 2000,  # the gradient of h1 for h1 itself
        "BW0.0/0": 10 + 4000,
        "NORM": 4000,
        "STEP": 0,
    }  # fmt: skip


def test_what_is_computed_again_is_there_for_its_backward_only() -> None:
    found = live("recompute=yes,stages=2", chain(2, "10", saved="100", inputs="7"))
    assert found["F0.0/1"] == 7 + 10 + 10
    assert found["A0.0/1"] == found["F0.0/1"] + 100
    assert (
        found["A0.0/0"] == 10 + 10 + 2000 + 100
    )  # the loss, the gradient of h1; inputs are read here for the last time


def test_weight_gradients_that_come_later_keep_what_they_need() -> None:
    found = live("schedule=zb-h1,stages=1", chain(1, "10", saved="100", saved_w="30"))
    assert found["B0.0/0"] == 10 + 100 + 30 and found["W0.0/0"] == 10 + 2000


def test_memory_that_values_share_counts_once_until_the_last_of_them_goes() -> None:
    first, view, last = ("x",), ("v",), ("h1",)
    steps = (
        BlockOp("segment", (), first, 1, sizes=("10",), traced=Backward(first, (), (), (), first, saved_bw="0")),
        BlockOp("segment", first, view, 1, sizes=("10",), traced=Backward(
            view, first, (), (), (), saved_bw="0", trains=False, same=(("v", "x"),), d_same=(("x", "v"),))),
        BlockOp("segment", view, last, 1, sizes=("4",), traced=Backward(last, view, view, view, last, saved_bw="0")),
    )  # fmt: skip
    found = live("stages=1", replace(simple_shape(1), ops=(steps,)))
    assert [found[f"F0.0/0:{step}"] for step in range(3)] == [10, 10, 14]
    # The gradient of v becomes that of x where it is.
    assert found["BW0.0/0:2"] == 4 + 10 + 1000 and found["BW0.0/0:1"] == 4 + 10 + 1000


def test_gathered_parameters_are_there_for_their_use() -> None:
    found = live("dp=2,zero=3,stages=3", chain(3, "0"))
    assert [found[f"F0.0/{block}"] for block in range(3)] == [1000, 1000, 1000]
    compiled = compile_plan(Plan.parse("dp=2,zero=3,stages=3"), chain(3, "0"))
    assert compiled.tables[0].peak("gathered") == compiled.peak_gathered(0) == 2


def test_an_evaluation_keeps_its_losses_and_nothing_else() -> None:
    shape = chain(3, "10", saved="100")
    compiled = compile_forward(Plan.parse("stages=3"), shape, 2)
    found = live_bytes(compiled.tables[0], Sizes.of(compiled, costs_of(shape)))
    assert max(found) == found[-1] == 2 * 10


# What a rank holds at most.


@pytest.mark.parametrize("zero, weights, gradients, optimizer, gathered", [
    (0, 4000, 8000, 24000, 0),
    (2, 4000, 3 * 2000 + 3 * 1000, 12000, 0),  # of block 0 and of two under way, and the sums of three
    (3, 2000, 3 * 2000 + 2 * 1000, 12000, 2000),  # at block 1, with its weights and the next one's
])  # fmt: skip
def test_zero_shards_optimizer_state_then_gradients_then_weights(
    zero: int, weights: int, gradients: int, optimizer: int, gathered: int
) -> None:
    held = memory(Plan(dp=2, zero=zero, stages=(4,)))
    assert (held["parameters"], held["gradients"], held["masters"] + held["moments"]) == (weights, gradients, optimizer)
    assert held.get("gathered", 0) == gathered


def test_whole_gradients_stay_until_their_reduction_has_arrived() -> None:
    assert memory(Plan(dp=2, zero=1, stages=(1,)), group_link=Link(1.0))["gradients"] == 2000 + 1000


def test_shards_are_those_of_the_zero_group_and_round_up() -> None:
    plan, shape = Plan(dp=4, zero=3, zero_degree=2, stages=(1,)), simple_shape(1)
    costs = replace(uniform(shape), buckets=(BucketCosts(7, 7, 7, 14),))
    assert resident_bytes(compile_plan(plan, shape), costs, 0) == {"parameters": 4, "masters": 4, "moments": 7}


def test_activations_of_1f1b_are_as_many_micro_batches_as_stages_are_left() -> None:
    plan = Plan(pp=4, mb=8, stages=(1,) * 4)
    held = [memory(plan, rank, chain(4, "0", saved="10000"))["activations"] for rank in range(4)]
    assert held == [40000, 30000, 20000, 10000]


def test_gpipe_keeps_every_micro_batch() -> None:
    plan = Plan(pp=2, mb=8, schedule="gpipe", stages=(1, 1))
    assert memory(plan, 1, chain(2, "0", saved="10000"))["activations"] == 80000


def test_1f1b_holds_as_many_slices_as_its_bound_and_gpipe_all() -> None:
    shape = chain(2, "0", saved="tokens * 1000")
    for schedule, expected in (("1f1b", [5, 4]), ("gpipe", [32, 32])):
        plan = Plan.parse(f"pp=2,mb=8,slices=4,stages=1-1,schedule={schedule}")
        held = [memory(plan, rank, shape, dims={"tokens": 64})["activations"] for rank in (0, 1)]
        assert held == [number * 16000 for number in expected]


def test_what_arrives_is_there_from_when_it_is_asked_for_and_what_is_sent_until_it_has_been() -> None:
    plan, shape = Plan(pp=2, mb=1, stages=(1, 1)), chain(2, "tokens * 100000")
    held = memory(plan, 0, shape, dims={"tokens": 1}, message_link=Link(1.0))
    # Rank 0 has asked for the gradients before its outputs are gone.
    assert (held["activations"], held["gradients of activations"]) == (100000, 100000)
    alone = memory(Plan(stages=(2,)), 0, shape, dims={"tokens": 1})
    assert (alone["activations"], alone["gradients of activations"]) == (200000, 100000)  # h1 and the loss


def test_frozen_buckets_have_neither_gradients_nor_optimizer_state() -> None:
    held = memory(Plan(mb=2, stages=(2,)), shape=replace(simple_shape(2), trained=(False, True)))
    assert (held["parameters"], held["gradients"], held["masters"] + held["moments"]) == (2000, 2000, 6000)


def test_a_gradient_that_nothing_is_added_to_is_as_wide_as_its_parameter() -> None:
    last = replace(simple_shape(2), trained=(False, True))
    assert [memory(Plan(mb=mb, stages=(2,)), shape=last)["gradients"] for mb in (1, 2)] == [1000, 2000]


def test_what_a_computation_needs_while_it_runs_comes_and_goes() -> None:
    plan, plain = Plan(pp=2, mb=4, stages=(1, 1)), chain(2, "0", saved="10000")
    assert "working" not in memory(plan, 0, plain)
    steps = tuple((replace(own[0], working=("70", "0", "0", "tokens * 1000")),) for own in plain.ops)
    shape = replace(plain, ops=steps)
    held = memory(plan, 0, shape, dims={"tokens": 30})
    assert held["working"] == 30000 and held["activations"] == 20000
    sliced = Plan.parse("pp=2,mb=2,slices=2,stages=1-1")
    assert memory(sliced, 0, shape, dims={"tokens": 30})["working"] == 15000


def test_what_is_added_to_a_gradient_is_there_by_itself_before() -> None:
    read_twice = (segment("h1", "x"), segment("h1 x", "h2"))
    steps = ((segment("", "h1"),), read_twice)
    sized = tuple(tuple(replace(step, sizes=("1000",) * len(step.writes)) for step in own) for own in steps)
    assert memory(Plan(stages=(2,)), 0, replace(simple_shape(2), ops=sized))["working"] == 1000


def test_pairs_keep_no_more_activations_because_one_is_freed_as_the_other_grows() -> None:
    steps = tuple((segment(f"h{n}" if n else "", f"x{n}"), segment(f"x{n}", f"h{n + 1}")) for n in range(4))
    own = tuple(tuple(replace(step, traced=replace(step.bw, saved_bw="10000")) for step in block) for block in steps)
    shape = replace(simple_shape(4), ops=own)
    held = [memory(Plan.parse(f"tp=2,mb=4,pairs={pairs},stages=4"), 0, shape)["activations"] for pairs in ("no", "yes")]
    assert held[1] <= held[0] + 2 * 10000  # of the blocks that both are at
