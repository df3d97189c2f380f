"""The simulator: what waits for what, what a message or a collective takes, and the closed forms of known schedules."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.plan.plan import Plan
from phalanx.predict.costs import BucketCosts, Costs, Link, uniform
from phalanx.predict.simulate import seconds_among_others, simulate
from phalanx.predict.timeline import Event, Timeline
from phalanx.program.compile import compile_forward, compile_plan
from phalanx.program.instructions import COLLECTIVES, Op
from phalanx.program.shape import ModelShape
from tests.program.random_plans import by_hand, cases, chain, simple_shape


def plan_of(pp: int = 1, dp: int = 1, mb: int = 1, schedule: str = "1f1b", v: int = 0, zero: int = 0) -> Plan:
    """One block per stage."""
    plan = Plan(pp=pp, dp=dp, mb=mb, schedule=schedule, v=v, zero=zero)
    return replace(plan, stages=(1,) * plan.num_stages)


def timeline_of(plan: Plan, f: float = 1, b: float = 1, w: float = 1, send: float = 0) -> Timeline:
    shape = simple_shape(plan.num_stages)
    return simulate(compile_plan(plan, shape), uniform(shape, f, b, w, send))


def run(plan: Plan, costs: Costs, *texts: str, rendezvous: bool = True) -> dict[tuple[int, str], Event]:
    """The events of hand-written programs, by rank and instruction."""
    compiled = by_hand(plan, simple_shape(plan.num_stages, *((0, 1),) * (len(costs.buckets) - plan.num_stages)), *texts)
    timeline = simulate(compiled, costs, rendezvous=rendezvous)
    return {(event.rank, str(event.instruction)): event for event in timeline.events}


def span(event: Event) -> tuple[float, float]:
    return event.start, event.end


PIPELINE = plan_of(pp=2)
FORWARD = ("F0.0/0 SF0.0>1 F0.1/0 SF0.1>1", "RF1.0<0 F1.0/1 RF1.1<0 F1.1/1")


def test_a_computation_waits_for_its_message_and_messages_run_beside_computations() -> None:
    events = run(PIPELINE, uniform(simple_shape(2), f=2, send=1), *FORWARD)
    assert span(events[0, "SF0.0>1"]) == span(events[1, "RF1.0<0"]) == (2, 3)
    assert span(events[0, "F0.1/0"]) == (2, 4)
    assert span(events[1, "F1.0/1"]) == (3, 5)
    assert events[0, "SF0.0>1"].resource == events[1, "RF1.0<0"].resource == "0→1 F"


def test_a_message_starts_when_its_receiver_asks_for_it_unless_it_is_buffered() -> None:
    costs = uniform(simple_shape(2), f=2, send=1)
    late = ("F0.0/0 SF0.0>1", "F1.7/1 F1.8/1 RF1.0<0 F1.0/1")
    assert span(run(PIPELINE, costs, *late)[1, "RF1.0<0"]) == (4, 5)
    assert span(run(PIPELINE, costs, *late, rendezvous=False)[1, "RF1.0<0"]) == (2, 3)


def test_messages_of_one_channel_follow_each_other_and_those_of_the_other_direction_do_not_wait() -> None:
    costs = uniform(simple_shape(2), f=1, send=5)
    both = ("RB0.7<1 F0.0/0 SF0.0>1 F0.1/0 SF0.1>1", "RF1.0<0 RF1.1<0 F1.7/1 SB1.7>0 F1.0/1 F1.1/1")
    events = run(PIPELINE, costs, *both)
    assert span(events[0, "SF0.0>1"]) == (1, 6)
    assert span(events[0, "SF0.1>1"]) == (6, 11)
    assert span(events[1, "SB1.7>0"]) == (1, 6)


def test_a_message_takes_the_latency_and_the_bytes_of_the_cut() -> None:
    shape = chain(2, "batch * 100")
    costs = replace(uniform(shape), dims={"batch": 3}, links={(0, 1): Link(0.5, 100.0)})
    sent = [e for e in simulate(compile_plan(PIPELINE, shape), costs).events if e.instruction.op is Op.SEND_F]
    assert [event.seconds for event in sent] == [3.5]


def test_single_links_are_those_of_ranks_of_the_world() -> None:
    plan, shape = Plan.parse("pp=2,dp=2,stages=1-1"), chain(2, "100")
    costs = replace(uniform(shape), dims={"batch": 1}, links={(1, 3): Link(0, 50.0)})
    timeline = simulate(compile_plan(plan, shape), costs)
    sends = {event.rank: event.seconds for event in timeline.events if event.instruction.op is Op.SEND_F}
    assert sends == {0: 0, 1: 2}


def test_collectives_begin_when_all_members_have_issued_them_and_hide_behind_computations() -> None:
    costs = replace(uniform(simple_shape(2, (0, 1))), group_link=Link(0, 10.0))
    costs = replace(costs, buckets=(BucketCosts(), BucketCosts(), BucketCosts(gradient_bytes=100)))
    events = run(PIPELINE, costs, "F0.0/0 T/2 F0.1/0 NORM STEP", "F1.0/1 F1.1/1 T/2 F1.2/1 NORM STEP")
    assert span(events[0, "T/2"]) == span(events[1, "T/2"]) == (2, 12)  # 2 · ½ of 100 bytes at 10 per second
    assert span(events[1, "F1.2/1"]) == (2, 3)
    norm = 3 * 8 / 10
    assert span(events[0, "NORM"]) == pytest.approx((12, 12 + norm))
    assert events[0, "STEP"].start == pytest.approx(12 + norm)


@pytest.mark.parametrize("zero, degree, seconds", [
    # Bytes 80 over 4 replicas at 1 byte a second, with 1 s latency, in a ring:
    (0, 0, [2 * 3 * (1 + 20)]),  # all-reduce
    (1, 0, [3 * (1 + 20)]),  # every rank needs its shard only
    (2, 2, [1 + 40, 2 * (1 + 20)]),  # scattered over two, then 40 bytes summed between two
])  # fmt: skip
def test_gradients_take_the_time_of_a_ring(zero: int, degree: int, seconds: list[float]) -> None:
    plan, shape = Plan(dp=4, zero=zero, zero_degree=degree, stages=(1,)), simple_shape(1)
    costs = replace(uniform(shape), buckets=(BucketCosts(gradient_bytes=80),), group_link=Link(1, 1.0))
    timeline = simulate(compile_plan(plan, shape), costs)
    events = [event for event in timeline.events if event.rank == 0 and event.instruction.op in (Op.REDUCE, Op.SUM)]
    assert [event.seconds for event in events] == seconds
    assert events[0].end == events[-1].start or len(events) == 1


def test_a_computation_waits_for_its_gathered_parameters() -> None:
    plan, bucket = plan_of(dp=2, zero=3), BucketCosts(weight_bytes=10)
    costs = replace(uniform(simple_shape(1)), buckets=(bucket,), links={(0, 1): Link(0, 1.0)})
    assert span(run(plan, costs, "G0.0/0 F0.0/0")[1, "F0.0/0"]) == (5, 6)


def test_updated_parameters_are_shared_after_the_step() -> None:
    plan, bucket = plan_of(dp=2, zero=1), BucketCosts(weight_bytes=10, step_seconds=6)
    costs = replace(uniform(simple_shape(1)), buckets=(bucket,), links={(0, 1): Link(0, 1.0)})
    events = run(plan, costs, "F0.0/0 STEP P/0")
    assert span(events[0, "STEP"]) == (1, 4)  # a half of the parameters
    assert span(events[0, "P/0"]) == (4, 9)
    partly = replace(costs, buckets=(replace(bucket, frozen_bytes=4),))  # frozen ones did not change
    events = run(plan, partly, "F0.0/0 STEP P/0")
    assert span(events[0, "P/0"]) == (4, 7)


def test_the_gradients_of_tied_parameters_are_summed_after_their_reduction_and_before_the_norm() -> None:
    plan, shape = plan_of(pp=2, dp=2), simple_shape(2, (0, 1))
    buckets = (BucketCosts(), BucketCosts(), BucketCosts(gradient_bytes=10))
    timeline = simulate(compile_plan(plan, shape), replace(uniform(shape), buckets=buckets, group_link=Link(0, 1.0)))
    for rank in range(4):
        by_op = {e.instruction.op: e for e in timeline.events if e.rank == rank and e.instruction.block in (2, None)}
        assert by_op[Op.REDUCE].end <= by_op[Op.TIE].start
        assert by_op[Op.TIE].end <= by_op[Op.NORM].start < by_op[Op.NORM].end == by_op[Op.STEP].start
        assert by_op[Op.TIE].seconds == 10


def test_the_backward_of_the_loss_waits_for_the_number_of_items() -> None:
    costs = replace(uniform(simple_shape(1)), group_link=Link(3, 8.0))
    events = run(plan_of(dp=2), costs, "COUNT F0.0/0 BW0.0/0")
    assert span(events[0, "COUNT"]) == (0, 2 * (3 + 0.5))
    assert events[0, "F0.0/0"].start == 0 and events[0, "BW0.0/0"].start == 7


def test_programs_that_wait_for_each_other_are_refused() -> None:
    crossed = ("RB0.0<1 BW0.0/0 SF0.0>1", "RF1.0<0 F1.0/1 SB1.0>0")
    with pytest.raises(AssertionError, match="wait for each other"):
        run(PIPELINE, uniform(simple_shape(2)), *crossed)


def issuing(seconds: float) -> Timeline:
    """Where starting a message takes so much of a rank's own time."""
    shape = simple_shape(2)
    costs = replace(uniform(shape, send=0.25), issue_seconds=seconds)
    return simulate(compile_plan(plan_of(pp=2, mb=4), shape), costs)


def test_a_computation_begins_when_the_messages_before_it_are_started() -> None:
    starts = {(event.rank, str(event.instruction)): event.start for event in issuing(0.5).events}
    assert starts[0, "SF0.0>1"] == 1.5
    assert starts[0, "F0.1/0"] == 2.0  # the send, and a receive posted ahead
    assert starts[1, "F1.0/1"] == 1.75  # the message itself takes as long as before


def test_starting_a_message_is_neither_computation_nor_an_event() -> None:
    before, after = issuing(0.0), issuing(0.5)
    assert [event.instruction for event in after.events] == [event.instruction for event in before.events]
    assert [after.busy(rank) for rank in (0, 1)] == [before.busy(rank) for rank in (0, 1)]
    assert after.makespan > before.makespan and after.mean_bubble > before.mean_bubble


sizes = st.integers(1, 8).flatmap(lambda p: st.tuples(st.just(p), st.integers(p, 16)))
times = st.integers(1, 5)


@given(sizes, st.sampled_from(["gpipe", "1f1b"]), times, times, times)
def test_the_bubble_of_gpipe_and_1f1b_is_the_closed_form(
    size: tuple[int, int], schedule: str, f: int, b: int, w: int
) -> None:
    p, m = size
    timeline = timeline_of(plan_of(p, mb=m, schedule=schedule), f, b, w)
    assert timeline.makespan == (m + p - 1) * (f + b + w)
    for rank in range(p):
        assert timeline.bubble(rank) == pytest.approx((p - 1) / (m + p - 1))


@given(st.integers(2, 8), st.integers(1, 4), st.integers(2, 4), times)
@settings(max_examples=12)
def test_virtual_stages_divide_the_bubble_when_micro_batches_are_a_multiple_of_ranks(
    p: int, n: int, v: int, f: int
) -> None:
    m = p * min(n, 16 // p)
    timeline = timeline_of(plan_of(p, mb=m, schedule="interleaved", v=v), f, f, f)
    for rank in range(p):
        assert timeline.bubble(rank) == pytest.approx((p - 1) / (v * m + p - 1))


@given(st.integers(1, 8), st.integers(0, 8), times, times, times)
def test_zb_h1_idles_for_a_forward_and_a_backward_less_a_weight_gradient_per_further_stage(
    p: int, more: int, f: int, b: int, w: int
) -> None:
    """With enough micro-batches, and weight gradients that fit into the gaps they are to fill."""
    m, w = 2 * p - 1 + more, min(f, b, w)
    timeline = timeline_of(plan_of(p, mb=m, schedule="zb-h1"), f, b, w)
    idle = (p - 1) * (f + b - w)
    for rank in range(p):
        assert timeline.bubble(rank) == pytest.approx(idle / (m * (f + b + w) + idle))


@given(st.integers(2, 6), st.integers(1, 12), times, times, st.floats(0, 0.5))
def test_eager_1f1b_waits_for_messages_only_while_it_fills_and_drains(
    p: int, m: int, f: int, b: int, part: float
) -> None:
    """However many micro-batches there are, if a message is not longer than half of one's computation."""
    send = part * (f + b)
    eager = timeline_of(plan_of(p, mb=m, schedule="eager-1f1b"), f, b, 0, send=send)
    assert eager.makespan == pytest.approx((m + p - 1) * (f + b) + 2 * (p - 1) * send)
    assert eager.makespan <= timeline_of(plan_of(p, mb=m, schedule="1f1b"), f, b, 0, send=send).makespan


@given(cases(), st.sampled_from([0, 0.25]))
def test_every_compiled_plan_can_be_simulated_for_all_ranks(case: tuple[Plan, object], send: float) -> None:
    plan = case[0]
    shape = simple_shape(sum(plan.stages))
    compiled = compile_plan(plan, shape)
    timeline = simulate(compiled, uniform(shape, send=send))
    by_rank = {rank: [event for event in timeline.events if event.rank == rank] for rank in compiled.mesh.world}
    assert len(timeline.memory) == plan.world and sum(map(len, by_rank.values())) == len(timeline.events)
    for rank, events in by_rank.items():
        assert tuple(event.instruction for event in events) == compiled.program(rank)
        computed = [event for event in events if event.resource == "compute"]
        assert all(before.end <= after.start for before, after in pairwise(computed))
        blocks = sum(plan.stages[stage] for stage in plan.stages_of(compiled.pp_index(rank)))
        assert timeline.busy(rank) == plan.mb * blocks * 3


@given(cases())
@settings(max_examples=15)
def test_one_pipeline_stands_for_all_where_links_are_alike(case: tuple[Plan, object]) -> None:
    """A link that is named and no different makes every rank be simulated by itself."""
    plan = replace(case[0], dp=2, zero=min(case[0].zero, 1), zero_degree=0, gather="", reduce="", mb=min(case[0].mb, 4))
    shape = simple_shape(sum(plan.stages))
    compiled, costs = compile_plan(plan, shape), uniform(shape, send=0.5)
    costs = replace(costs, buckets=(BucketCosts(10, 10, 10, 1.0),) * shape.num_buckets, group_link=Link(0.25, 10.0))
    alone = simulate(compiled, replace(costs, links={(0, 1): costs.group_link}))
    assert simulate(compiled, costs) == alone


def test_replicas_have_resources_of_their_own() -> None:
    shape = simple_shape(2)
    timeline = simulate(compile_plan(Plan.parse("pp=2,dp=2,stages=1-1"), shape), uniform(shape))
    found = {
        (e.rank, e.instruction.op): e.resource for e in timeline.events if e.instruction.op in (Op.SEND_F, Op.REDUCE)
    }
    assert found[0, Op.SEND_F] == "0→2 F" and found[1, Op.SEND_F] == "1→3 F"
    assert found[1, Op.REDUCE] == "ranks 0,1" and found[3, Op.REDUCE] == "ranks 2,3"
    assert all("ranks" in e.resource for e in timeline.events if e.instruction.op in COLLECTIVES)


def test_an_evaluation_can_be_simulated_and_keeps_no_activations() -> None:
    plan, shape = plan_of(2, mb=3), chain(2, "0", saved="100")
    timeline = simulate(compile_forward(plan, shape, 3), uniform(shape))
    assert timeline.makespan == 4
    assert [timeline.peak_memory(rank) for rank in (0, 1)] == [0, 0]


# A step among others.


@given(cases())
def test_a_step_among_others_takes_no_longer_and_less_only_where_something_is_left_on_its_way(
    case: tuple[Plan, ModelShape],
) -> None:
    plan, shape = case
    costs = replace(uniform(shape, send=0.25), group_link=Link(latency_s=0.5))
    compiled = compile_plan(plan, shape)
    alone, among = simulate(compiled, costs).makespan, seconds_among_others(compiled, costs)
    assert among <= alone + 1e-9
    if plan.zero in (0, 3):
        assert among == pytest.approx(alone)


def test_shared_parameters_arrive_beneath_the_next_forward() -> None:
    """Of four buckets that take a second each to share, the first is waited for, and each of the others comes while the
    block before it is computed."""
    plan, shape = Plan.parse("dp=2,zero=1,stages=4"), simple_shape(4)
    costs = replace(
        uniform(shape), buckets=(BucketCosts(weight_bytes=2**31),) * 4, group_link=Link(bytes_per_s=2.0**30)
    )
    compiled = compile_plan(plan, shape)
    assert simulate(compiled, costs).makespan == pytest.approx(4 * 3 + 4)
    assert seconds_among_others(compiled, costs) == pytest.approx(4 * 3 + 1)


def test_the_host_updates_beneath_the_next_forward() -> None:
    plan, shape = Plan.parse("offload=optimizer-step,stages=4"), simple_shape(4)
    costs = replace(uniform(shape), buckets=(BucketCosts(host_step_seconds=1.0),) * 4)
    compiled = compile_plan(plan, shape)
    assert simulate(compiled, costs).makespan == 4 * 3 + 4
    assert seconds_among_others(compiled, costs) == 4 * 3 + 1
