"""Simulated parts of micro-batches: redistributions travel beside computation until someone needs them, and slices cost
what their tokens attend to."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.errors import PlanError
from phalanx.observe.program_files import chrome_trace, svg
from phalanx.observe.program_text import bars_of, chart, lanes_of
from phalanx.plan.plan import Plan
from phalanx.plan.rules import OVERLAPS
from phalanx.predict.costs import Costs, Link, SliceCost, uniform, work_of
from phalanx.predict.shares import Shares
from phalanx.predict.simulate import simulate
from phalanx.predict.timeline import Event, Timeline
from phalanx.program.compile import compile_plan
from phalanx.program.instructions import COMPUTE, REDISTRIBUTIONS, Instruction, Op
from phalanx.program.shape import ModelShape
from tests.program.random_plans import by_hand, chain, simple_shape
from tests.program.sliced_plans import Case, grains, sliced_cases, slicings
from tests.program.tensor_shapes import redistribution, segment, stack, tensor_cases

LAYERS = 6
SHAPE = stack(LAYERS)
DIMS = {"batch": 2, "tokens": 64, "source": 10}


def linked(shape: ModelShape, bytes_per_s: float) -> Costs:
    return replace(uniform(shape), group_link=Link(0, bytes_per_s), dims={"batch": 2}, element_bytes=4)


def overlapped(overlap: str, bytes_per_s: float, extra: str = "") -> Timeline:
    plan = Plan.parse(f"tp=2,overlap={overlap},stages={LAYERS}{extra}")
    shape = stack(LAYERS, sequence=plan.sequence)
    return simulate(compile_plan(plan, shape), linked(shape, bytes_per_s))


def events_of(shape: ModelShape, text: str, bytes_per_s: float = 800) -> dict[str, Event]:
    """The events of rank 0 when both ranks run the same hand-written program; an all-reduce takes 1 s."""
    plan = Plan.parse(f"tp=2,overlap=halves,stages={shape.num_blocks}")
    timeline = simulate(by_hand(plan, shape, text), linked(shape, bytes_per_s))
    return {str(event.instruction): event for event in timeline.events if event.rank == 0}


def span(event: Event) -> tuple[float, float]:
    return event.start, event.end


# Redistributions.


def test_a_segment_takes_its_share_of_the_block_and_an_redistribution_its_bytes_on_the_ring() -> None:
    events = events_of(SHAPE, "F0.0/0:0 F0.0/0:2 CF0.0/0:3 F0.0/0:4 F0.0/0:6")
    assert [events[f"F0.0/0:{step}"].seconds for step in (0, 2, 4, 6)] == [0, 0.5, 0, 0.5]
    assert span(events["CF0.0/0:3"]) == (0.5, 1.5)  # 2 · ½ of 2 · 100 elements of 4 bytes at 800 a second
    assert events["CF0.0/0:3"].resource == "ranks 0,1"
    assert span(events["F0.0/0:6"]) == (1.5, 2.0)  # its input is made of what the all-reduce brings


def test_ranks_lose_time_where_all_wait_for_a_redistribution_and_none_where_something_is_computed_beneath() -> None:
    plan = Plan.parse(f"tp=2,overlap=halves,stages={LAYERS}")
    met = replace(linked(SHAPE, 800), meeting_seconds={2: 0.25})
    waited, hidden = "F0.0/0:2 CF0.0/0:3 F0.0/0:4", "F0.0/0:2 CF0.0/0:3 F0.0/1:2 F0.0/0:4"
    for text, lost in ((waited, 0.25), (hidden, 0.0)):
        ends = [simulate(by_hand(plan, SHAPE, text), costs).makespan for costs in (linked(SHAPE, 800), met)]
        assert ends[1] - ends[0] == lost


def test_starting_a_redistribution_takes_of_a_ranks_own_time() -> None:
    plan = Plan.parse(f"tp=2,overlap=halves,stages={LAYERS}")
    started = replace(linked(SHAPE, 800), start_seconds=0.25)
    timeline = simulate(by_hand(plan, SHAPE, "F0.0/0:2 CF0.0/0:3 F0.0/1:2 F0.0/0:4"), started)
    first, other = (e for e in timeline.events if e.rank == 0 and str(e.instruction) in ("F0.0/0:2", "F0.0/1:2"))
    assert other.start - first.end == 0.25


def test_halves_take_half_the_time_and_one_travels_behind_the_other() -> None:
    halves = "F0.0a/0:0 F0.0a/0:2 CF0.0a/0:3 F0.0b/0:0 F0.0b/0:2 CF0.0b/0:3 F0.0a/0:4 F0.0a/0:6 F0.0b/0:4"
    events = events_of(SHAPE, halves, bytes_per_s=1600)
    assert span(events["CF0.0a/0:3"]) == span(events["F0.0b/0:2"]) == (0.25, 0.5)
    assert span(events["CF0.0b/0:3"]) == span(events["F0.0a/0:6"]) == (0.5, 0.75)


def test_the_gradient_of_an_input_travels_behind_the_weight_gradients() -> None:
    events = events_of(SHAPE, "BW0.0/0:8 B0.0/0:6 CB0.0/0:5 W0.0/0:6 BW0.0/0:4 B0.0/0:2")
    assert span(events["CB0.0/0:5"]) == (0.5, 1.5)
    assert span(events["W0.0/0:6"]) == (0.5, 1.0)
    assert events["BW0.0/0:4"].start == 1.5  # the segment that wrote the activation


def test_a_backward_waits_for_what_is_gathered_again_for_it() -> None:
    shape = stack(1, sequence=True)
    events = events_of(shape, "CA0.0/0:5 BW0.0/0:8 B0.0/0:6 CB0.0/0:5 W0.0/0:6", bytes_per_s=400)
    assert span(events["CA0.0/0:5"]) == (0, 1)  # an all-gather sends half of what an all-reduce does
    assert span(events["B0.0/0:6"]) == (1, 1.5)


def test_what_an_redistribution_does_alone_takes_no_time_and_sends_nothing() -> None:
    steps = (segment("", "x", "1"), redistribution("x", "s", ((0, 1),), "shard", "all_gather"), segment("s", "h1", "1"))
    events = events_of(ModelShape(1, (), (True,), (True,), (steps,)), "F0.0/0:0 LF0.0/0:1 F0.0/0:2")
    assert span(events["LF0.0/0:1"]) == (0.5, 0.5) and events["LF0.0/0:1"].resource == "compute"
    assert events["F0.0/0:2"].start == 0.5


def test_redistributions_of_redistributions_wait_for_each_other_and_messages_for_all_of_them() -> None:
    cells = ((0, 1),)
    first = redistribution("a", "b", cells, "all_reduce", "all_reduce")
    steps = (segment("", "a"), first, redistribution("b", "c", cells), redistribution("c", "h1", cells, "all_reduce"))
    shape = ModelShape(2, (), (True,) * 2, (True,) * 2, (steps, (segment("h1", "h2"),)))
    costs = replace(linked(shape, 800), message_link=Link(2.0))
    timeline = simulate(compile_plan(Plan.parse("pp=2,tp=2,stages=1-1"), shape), costs)
    events = {str(event.instruction): event for event in timeline.events if event.rank in (0, 2)}
    assert span(events["CF0.0/0:1"]) == (1, 2) and span(events["CF0.0/0:3"]) == (2, 3)
    assert span(events["SF0.0>2"]) == (3, 5)
    assert events["F1.0/1"].start == 5
    assert events["CB0.0/0:1"].start == events["RB0.0<2"].end  # the first of the backward waits for the message
    assert events["BW0.0/0:0"].start == events["CB0.0/0:1"].end


@pytest.mark.parametrize("share", [0.8, 1.0, 1.25])
def test_oases_hides_communication_that_takes_about_as_long_as_computation(share: float) -> None:
    """Communication of `share` times the computation, both of default_checkpoint."""
    alone = overlapped("default_checkpoint", float("inf")).makespan
    num_redistributions = (
        sum(e.instruction.op in REDISTRIBUTIONS for e in overlapped("default_checkpoint", 1).events) / 2
    )
    bytes_per_s = num_redistributions * 800 / (share * alone)
    makespans = {overlap: overlapped(overlap, bytes_per_s).makespan for overlap in OVERLAPS}
    assert makespans["oases"] * 1.45 < makespans["default_checkpoint"]
    assert makespans["oases"] < min(makespans["optim_comm_checkpoint"], makespans["overlap_checkpoint"])
    assert makespans["halves"] < makespans["none"]
    redistribution = 800 / bytes_per_s
    ideal = LAYERS * (max(1, 2 * redistribution) + max(3, 2 * redistribution))  # forward, backward
    assert ideal <= makespans["oases"] < 1.1 * ideal


@pytest.mark.parametrize("overlap", ["none", "optim_comm_checkpoint", "oases", "halves"])
def test_pairs_hide_what_a_forward_cannot_hide_by_itself(overlap: str) -> None:
    """As much communication as computation: halves alone wait for it in the forward, where it takes longer."""
    alone = overlapped(overlap, float("inf"), ",mb=6").makespan
    redistributions = (
        sum(e.seconds for e in overlapped(overlap, 800, ",mb=6").events if e.instruction.op in REDISTRIBUTIONS) / 2
    )
    bytes_per_s = 800 * redistributions / alone
    single, paired = (overlapped(overlap, bytes_per_s, f",mb=6,pairs={pairs}").makespan for pairs in ("no", "yes"))
    assert paired < single
    assert alone / paired > 0.85


@pytest.mark.parametrize("overlap", sorted(OVERLAPS))
def test_what_is_computed_again_takes_as_long_as_the_forward(overlap: str) -> None:
    timeline = overlapped(overlap, float("inf"))
    forwards = 4 if OVERLAPS[overlap].recompute else 3
    assert timeline.busy(0) == pytest.approx(LAYERS * forwards)


def test_messages_of_halves_are_half_as_large() -> None:
    plan, plain = Plan.parse("pp=2,tp=2,overlap=halves,stages=1-1"), stack(2)
    steps = tuple(tuple(replace(step, sizes=("batch * 32",) * len(step.writes)) for step in own) for own in plain.ops)
    shape = replace(plain, ops=steps)
    costs = replace(linked(shape, float("inf")), message_link=Link(0, 32.0))
    sends = [e for e in simulate(compile_plan(plan, shape), costs).events if e.instruction.op is Op.SEND_F]
    assert [e.seconds for e in sends] == [1.0] * 4


@settings(max_examples=15)
@given(tensor_cases())
def test_every_program_of_steps_can_be_simulated_and_computes_all_it_should(case: Case) -> None:
    plan, shape = case
    compiled = compile_plan(plan, shape)
    timeline = simulate(compiled, linked(shape, 100))
    passes = {b: 4 if plan.recompute_of(b, shape.layers) in ("unit", "block") else 3 for b in range(shape.num_blocks)}
    for rank in timeline.ranks:
        blocks = {it.block for it in compiled.program(rank) if it.op in COMPUTE and it.block is not None}
        assert timeline.busy(rank) == pytest.approx(plan.mb * sum(passes[block] for block in blocks))


def test_pictures_show_halves_and_redistributions() -> None:
    timeline = overlapped("oases", 1600)
    bars = bars_of(timeline)
    assert lanes_of(bars) == ("compute", "collectives")
    assert {"F0.0a", "A0.0b", "CF0.0a/0:3", "CB0.0b/0:1"} <= {bar.title for bar in bars}
    assert {bar.label for bar in bars if bar.lane == "compute"} == {"0a", "0b"}
    lines = [line.plain for line in chart(timeline, (0,), 400)]
    assert any("F0a" in line and "F0b" in line for line in lines) and "A forward again" in lines[-1]
    assert "redistribution back" in svg({"predicted": timeline})


def test_traces_tell_halves_apart() -> None:
    shape = stack(2)
    compiled = compile_plan(Plan.parse("pp=2,tp=2,overlap=halves,stages=1-1"), shape)
    trace = chrome_trace({"step": simulate(compiled, linked(shape, 100))})
    assert '"id": "step F0.0a 0\\u21922"' in trace and '"id": "step F0.0b 0\\u21922"' in trace
    assert '"half": 1, "block": 0, "op_index": 2' in trace


# Slices.


def costs_of(shape: ModelShape, **fields: object) -> Costs:
    return replace(uniform(shape), dims=DIMS, **fields)  # pyright: ignore


def sliced(text: str, num_whole: int = 0, **fields: object) -> Timeline:
    plan = Plan.parse(text)
    plain = simple_shape(sum(plan.stages))
    activations = frozenset(f"h{n + 1}" for n in range(num_whole))
    shape = replace(plain, granularities=grains(num_whole, plain.num_blocks), per_micro_batch=activations)
    return simulate(compile_plan(plan, shape), costs_of(shape, **fields))


def slice_cost_of(plan: Plan, flops: list[str], dims: dict[str, int]) -> SliceCost:
    """By the arithmetic of blocks."""
    steps = tuple((segment(f"h{n}" if n else "", f"h{n + 1}", text),) for n, text in enumerate(flops))
    shape = replace(simple_shape(len(flops)), ops=steps)
    own = Shares(plan, shape, replace(costs_of(shape), dims=dims))
    return lambda block, micro_batch, slice: own.seconds(Instruction(Op.F, 0, micro_batch, block, slice=slice))


def shares(text: str, shape: ModelShape) -> Shares:
    return Shares(Plan.parse(text), shape, costs_of(shape))


@given(slicings, st.integers(0, 2), st.sampled_from(["tokens", "tokens * tokens", "batch * tokens * 7 + tokens * 3"]))
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


@given(st.integers(1, 5), slicings, st.sampled_from(["1f1b", "gpipe"]))
def test_one_sequence_takes_the_published_time(pp: int, slices: tuple[tuple[int, ...], ...], schedule: str) -> None:
    """Σ t + (K - 1) max t, of the forward and of the backward."""
    plan = Plan(pp=pp, slices=slices, schedule=schedule, stages=(1,) * pp)
    shape = simple_shape(pp)
    cost = slice_cost_of(plan, ["tokens * 100 + tokens * tokens"] * pp, DIMS)
    timeline = simulate(compile_plan(plan, shape), costs_of(shape, slice_cost=cost))
    longest = max(cost(0, 0, j) for j in range(plan.num_slices(0)))
    assert timeline.makespan == pytest.approx(3 * (1 + (pp - 1) * longest))


def test_slices_of_one_sequence_fill_a_pipeline_that_is_idle_without() -> None:
    whole = sliced("pp=4,stages=1-1-1-1")
    cut = sliced("pp=4,slices=16,stages=1-1-1-1")
    assert (whole.makespan, cut.makespan) == (pytest.approx(12), pytest.approx(3 * 19 / 16))


@settings(max_examples=12)
@given(sliced_cases())
def test_every_program_with_slices_can_be_simulated_and_computes_as_long_as_without(case: Case) -> None:
    plan, shape = case
    costs = costs_of(shape, slice_cost=slice_cost_of(plan, ["tokens"] * shape.num_blocks, DIMS))
    timeline = simulate(compile_plan(plan, shape), costs)
    expected = simulate(compile_plan(replace(plan, slices=()), shape), costs)
    for rank in range(plan.world):
        assert timeline.busy(rank) == pytest.approx(expected.busy(rank))


def test_a_measured_cost_is_taken_as_it_is() -> None:
    timeline = sliced("slices=4,stages=1", slice_cost=lambda block, micro_batch, slice: 0.5)
    assert timeline.makespan == pytest.approx(4 * 0.5 * 3)


def test_blocks_that_run_once_cost_what_they_do_for_the_whole_micro_batch() -> None:
    timeline = sliced("slices=4,stages=2", num_whole=1, slice_cost=lambda block, micro_batch, slice: 10.0)
    assert timeline.makespan == pytest.approx(3 + 4 * 10 * 3)


def test_attention_grows_with_the_past_and_other_steps_do_not() -> None:
    steps = ((segment("", "a", "tokens * tokens"), segment("a", "h1", "tokens * 64")),)
    own = shares("tp=2,slices=2", replace(simple_shape(1), ops=steps))
    seconds = [own.seconds(Instruction(Op.F, 0, 0, 0, op_index=i, slice=j)) for j in (0, 1) for i in (0, 1)]
    assert seconds == pytest.approx([1 / 8, 1 / 4, 3 / 8, 1 / 4])


def test_an_redistribution_sends_what_the_slice_has() -> None:
    between = replace(redistribution("x", "h1", ((0, 1),), "all_reduce"), elements="batch * tokens + source")
    own = shares("tp=2,slices=3-1", replace(simple_shape(1), ops=((segment("", "x"), between),)))
    elements = [own.elements(Instruction(Op.CF, 0, 0, 0, op_index=1, slice=j)) for j in (0, 1)]
    assert elements == [2 * 48 + 10, 2 * 16 + 10]


def test_messages_of_slices_travel_as_long_as_their_share() -> None:
    shape = chain(2, "tokens")
    costs = costs_of(shape, message_link=Link(bytes_per_s=64.0))
    timeline = simulate(compile_plan(Plan.parse("pp=2,slices=3-1,stages=1-1"), shape), costs)
    for op in (Op.SEND_F, Op.RECV_F):
        assert [e.seconds for e in timeline.events if e.instruction.op is op] == pytest.approx([0.75, 0.25])
    for op in (Op.SEND_B, Op.RECV_B):
        assert [e.seconds for e in timeline.events if e.instruction.op is op] == pytest.approx([0.25, 0.75])


def test_what_belongs_to_the_micro_batch_travels_once_with_slice_0() -> None:
    # h1 is an encoder's result, which the last block reads beside what comes from the one before.
    steps = ((segment("", "h1"),), (segment("h1", "h2"),), (segment("h1 h2", "h3"),))
    sizes = ("source", "tokens", "0")
    sized = tuple((replace(own[0], sizes=(size,)),) for own, size in zip(steps, sizes, strict=True))
    shape = replace(simple_shape(3), ops=sized, granularities=grains(1, 3), per_micro_batch=frozenset(("h1",)))
    costs = costs_of(shape, message_link=Link(bytes_per_s=1.0))
    for stages, expected in (("2-1", [10 + 48, 16]), ("1-2", [10])):
        timeline = simulate(compile_plan(Plan.parse(f"pp=2,slices=3-1,stages={stages}"), shape), costs)
        assert [e.seconds for e in timeline.events if e.instruction.op is Op.SEND_F] == expected


def test_events_of_slices_are_in_the_order_of_their_dependencies() -> None:
    timeline = sliced("pp=2,mb=2,slices=3,stages=1-1")
    ends = {str(event.instruction): event for event in timeline.events}
    for stage in (0, 1):
        for i in (0, 1):
            for before, after in pairwise(range(3)):
                assert ends[f"F{stage}.{i}.{before}/{stage}"].end <= ends[f"F{stage}.{i}.{after}/{stage}"].start
                assert ends[f"BW{stage}.{i}.{after}/{stage}"].end <= ends[f"BW{stage}.{i}.{before}/{stage}"].start


def test_a_timeline_with_slices_reads_back() -> None:
    timeline = sliced("pp=2,mb=2,slices=3,stages=1-1")
    assert Timeline.from_json(timeline.to_json()) == timeline


def test_a_model_without_tokens_is_refused() -> None:
    plan, shape = Plan.parse("slices=4,stages=1"), simple_shape(1)
    with pytest.raises(PlanError) as refused:
        simulate(compile_plan(plan, shape), replace(uniform(shape), dims={"batch": 2}))
    assert refused.value.message == "plan: slices=4 cuts tokens, and the model's inputs have none (dims: batch)"
    assert refused.value.hint == "leave slices out"
    with pytest.raises(PlanError, match="cuts tokens"):
        slice_cost_of(plan, ["batch"], {"batch": 2})(0, 0, 0)


def test_sequences_with_fewer_tokens_than_slices_are_refused() -> None:
    with pytest.raises(PlanError, match="slices=65 cuts 64 tokens into 65 slices"):
        sliced("slices=65,stages=1")
