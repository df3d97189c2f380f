"""Slices in the simulation: what a slice costs, how long a pipeline of them takes, what it holds."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.errors import PlanError
from phalanx.plan.plan import Plan
from phalanx.program.costs import Costs, Link, uniform
from phalanx.program.instructions import Instruction, Op
from phalanx.program.lower import lower
from phalanx.program.shape import ModelShape
from phalanx.program.shares import Shares
from phalanx.program.simulate import simulate
from phalanx.program.slice_costs import slice_cost_of, work_of
from phalanx.program.timeline import Timeline
from tests.program.random_plans import simple_shape
from tests.program.sliced_plans import Case, grains, sliced_cases, slicings
from tests.program.tensor_shapes import exchange, segment

DIMS = {"batch": 2, "tokens": 64, "source": 10}
EXPRESSIONS = ("tokens", "tokens * tokens", "batch * tokens * 7 + tokens * tokens * 3")


def costs_of(shape: ModelShape, **fields: object) -> Costs:
    return replace(uniform(shape), dims=DIMS, **fields)


def simulated(text: str, num_whole: int = 0, **fields: object) -> Timeline:
    plan = Plan.parse(text)
    plain = simple_shape(sum(plan.stages))
    shape = replace(plain, grains=grains(num_whole, plain.num_blocks))
    return simulate(plan, shape, lower(plan, shape), costs_of(shape, **fields))


def shares(text: str, shape: ModelShape, **fields: object) -> Shares:
    return Shares(Plan.parse(text), shape, costs_of(shape, **fields))


@given(slicings, st.integers(0, 2), st.sampled_from(EXPRESSIONS))
def test_slices_cost_together_what_the_micro_batch_does(
    slices: tuple[tuple[int, ...], ...], i: int, flops: str
) -> None:
    plan = Plan(slices=slices, mb=3)
    cost = slice_cost_of(plan, [flops], DIMS)
    assert sum(cost(0, i, j) for j in range(plan.num_slices(i))) == pytest.approx(1)


def test_a_slice_costs_more_the_more_tokens_came_before_it() -> None:
    cost = slice_cost_of(Plan.parse("slices=4"), ["tokens", "tokens * tokens", "0"], DIMS)
    assert [cost(0, 0, j) for j in range(4)] == [1 / 4] * 4
    assert [cost(1, 0, j) for j in range(4)] == [1 / 16, 3 / 16, 5 / 16, 7 / 16]
    assert [cost(2, 0, j) for j in range(4)] == [1 / 4] * 4


def test_what_does_not_depend_on_the_tokens_is_done_for_every_slice() -> None:
    assert work_of("source * 3 + tokens", DIMS, None) == 30 + 64
    assert work_of("source * 3 + tokens", DIMS, (16, 48)) == 30 + 32


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 5), slicings, st.sampled_from(["1f1b", "gpipe"]))
def test_one_sequence_takes_the_published_time(pp: int, slices: tuple[tuple[int, ...], ...], schedule: str) -> None:
    """Σ t + (K - 1) max t, of the forward and of the backward."""
    plan = Plan(pp=pp, slices=slices, schedule=schedule, stages=(1,) * pp)
    shape = simple_shape(pp)
    cost = slice_cost_of(plan, ["tokens * 100 + tokens * tokens"] * pp, DIMS)
    timeline = simulate(plan, shape, lower(plan, shape), costs_of(shape, slice_cost=cost))
    longest = max(cost(0, 0, j) for j in range(plan.num_slices(0)))
    assert timeline.makespan == pytest.approx(3 * (1 + (pp - 1) * longest))


def test_slices_of_one_sequence_fill_a_pipeline_that_is_idle_without() -> None:
    whole = simulated("pp=4,stages=1-1-1-1")
    sliced = simulated("pp=4,slices=16,stages=1-1-1-1")
    assert (whole.makespan, sliced.makespan) == (pytest.approx(12), pytest.approx(3 * 19 / 16))


@settings(max_examples=25, deadline=None)
@given(sliced_cases())
def test_every_program_with_slices_can_be_simulated_and_computes_as_long_as_without(case: Case) -> None:
    plan, shape = case
    costs = costs_of(shape, slice_cost=slice_cost_of(plan, ["tokens"] * shape.num_blocks, DIMS))
    timeline = simulate(plan, shape, lower(plan, shape), costs)
    whole = replace(plan, slices=())
    expected = simulate(whole, shape, lower(whole, shape), costs)
    for rank in range(plan.world):
        assert timeline.busy(rank) == pytest.approx(expected.busy(rank))


def test_a_measured_cost_is_taken_as_it_is() -> None:
    timeline = simulated("slices=4,stages=1", slice_cost=lambda block, micro_batch, slice: 0.5)
    assert timeline.makespan == pytest.approx(4 * 0.5 * 3)


def test_blocks_that_run_once_cost_what_they_do_for_the_whole_micro_batch() -> None:
    timeline = simulated("slices=4,stages=2", num_whole=1, slice_cost=lambda block, micro_batch, slice: 10.0)
    assert timeline.makespan == pytest.approx(3 + 4 * 10 * 3)


def test_attention_grows_with_the_past_and_other_steps_do_not() -> None:
    steps = ((segment("h0", "a", "tokens * tokens"), segment("a", "h1", "tokens * 64")),)
    shape = replace(simple_shape(1), steps=steps)
    own = shares("tp=2,slices=2", shape)
    seconds = [own.seconds(Instruction(Op.F, 0, 0, 0, step=i, slice=j)) for j in (0, 1) for i in (0, 1)]
    assert seconds == pytest.approx([1 / 8, 1 / 4, 3 / 8, 1 / 4])
    assert own.kept(Instruction(Op.F, 0, 0, 0, step=0, slice=1)) == pytest.approx(1 / 4)


def test_an_exchange_sends_what_the_slice_has() -> None:
    between = replace(exchange("h0", "h1", ((0, 1),), "all_reduce"), elements="batch * tokens + source")
    shape = replace(simple_shape(1), steps=((between,),))
    elements = [shares("tp=2,slices=3-1", shape).elements(Instruction(Op.CF, 0, 0, 0, step=0, slice=j)) for j in (0, 1)]
    assert elements == [2 * 48 + 10, 2 * 16 + 10]


@pytest.mark.parametrize("num_whole, whole, sizes", [(0, 0, [48, 16]), (0, 32, [24 + 32, 8]), (1, 64, [64])])
def test_a_message_carries_its_slice_and_what_belongs_to_the_micro_batch_with_slice_0(
    num_whole: int, whole: int, sizes: list[int]
) -> None:
    shape = replace(simple_shape(2), grains=grains(num_whole, 2))
    own = shares("pp=2,slices=3-1,stages=1-1", shape, cut_bytes=(64, 0), whole_cut_bytes=(whole, 0))
    for op, stage in ((Op.SEND_F, 0), (Op.RECV_F, 1), (Op.SEND_B, 1), (Op.RECV_B, 0)):
        found = [own.message_bytes(Instruction(op, stage, 0, peer=0, slice=j)) for j in range(len(sizes))]
        assert found == sizes


def test_messages_of_slices_travel_as_long_as_their_share() -> None:
    link = Link(latency_s=0.0, bytes_per_s=64.0)
    timeline = simulated("pp=2,slices=3-1,stages=1-1", cut_bytes=(64, 0), message_link=link)
    sent = [event.seconds for event in timeline.events if event.instruction.op is Op.SEND_F]
    assert sent == pytest.approx([0.75, 0.25])


def test_1f1b_holds_as_many_slices_as_its_bound_and_gpipe_all() -> None:
    plan = "pp=2,mb=8,slices=4,stages=1-1,schedule="
    held = {name: simulated(plan + name, saved_bytes=(640, 640)) for name in ("1f1b", "gpipe")}
    assert [rank["activations"] for rank in held["1f1b"].memory] == [5 * 160, 4 * 160]
    assert [rank["activations"] for rank in held["gpipe"].memory] == [32 * 160, 32 * 160]


def test_events_of_slices_are_in_the_order_of_their_dependencies() -> None:
    timeline = simulated("pp=2,mb=2,slices=3,stages=1-1")
    ends = {str(event.instruction): event for event in timeline.events}
    for stage in (0, 1):
        for i in (0, 1):
            for before, after in pairwise(range(3)):
                assert ends[f"F{stage}.{i}.{before}/{stage}"].end <= ends[f"F{stage}.{i}.{after}/{stage}"].start
                assert ends[f"BW{stage}.{i}.{after}/{stage}"].end <= ends[f"BW{stage}.{i}.{before}/{stage}"].start


def test_a_timeline_with_slices_reads_back() -> None:
    timeline = simulated("pp=2,mb=2,slices=3,stages=1-1")
    assert Timeline.from_json(timeline.to_json()) == timeline


def test_a_model_without_tokens_is_refused() -> None:
    plan, shape = Plan.parse("slices=4,stages=1"), simple_shape(1)
    with pytest.raises(PlanError) as refused:
        simulate(plan, shape, lower(plan, shape), replace(uniform(shape), dims={"batch": 2}))
    assert refused.value.message == "plan: slices=4 cuts tokens, and the model's inputs have none (dims: batch)"
    assert refused.value.hint == "leave slices out"
    with pytest.raises(PlanError, match="cuts tokens"):
        slice_cost_of(plan, ["batch"], {"batch": 2})(0, 0, 0)


def test_sequences_with_fewer_tokens_than_slices_are_refused() -> None:
    with pytest.raises(PlanError, match="slices=65 cuts 64 tokens into 65 slices"):
        simulated("slices=65,stages=1")
