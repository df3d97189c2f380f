"""The simulator: what waits for what, what a message or a collective takes, and the closed forms of known schedules."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.plan.plan import Plan
from phalanx.program.costs import BucketCosts, Costs, Link, uniform
from phalanx.program.instructions import Op, from_text
from phalanx.program.lower import lower, lower_forward
from phalanx.program.shape import ModelShape
from phalanx.program.simulate import simulate
from phalanx.program.timeline import Event, Timeline


def shape_of(num_blocks: int, shared: tuple[tuple[int, ...], ...] = ()) -> ModelShape:
    held = (True,) * (num_blocks + len(shared))
    return ModelShape(num_blocks, shared, held, held)


def plan_of(pp: int = 1, dp: int = 1, mb: int = 1, schedule: str = "1f1b", v: int = 0, zero: int = 0) -> Plan:
    """One block per stage."""
    plan = Plan(pp=pp, dp=dp, mb=mb, schedule=schedule, v=v, zero=zero)
    return replace(plan, stages=(1,) * plan.num_stages)


def timeline_of(plan: Plan, f: float = 1, b: float = 1, w: float = 1, send: float = 0) -> Timeline:
    shape = shape_of(plan.num_stages)
    return simulate(plan, shape, lower(plan, shape), uniform(shape, f, b, w, send))


def run(plan: Plan, costs: Costs, *texts: str, rendezvous: bool = True) -> dict[tuple[int, str], Event]:
    """The events of hand-written programs, by rank and instruction."""
    programs = [from_text(text) for text in texts]
    shape = shape_of(plan.num_stages)
    timeline = simulate(plan, shape, programs, costs, rendezvous=rendezvous)
    return {(event.rank, str(event.instruction)): event for event in timeline.events}


def span(event: Event) -> tuple[float, float]:
    return event.start, event.end


PIPELINE = plan_of(pp=2)
FORWARD = ("F0.0/0 SF0.0>1 F0.1/0 SF0.1>1", "RF1.0<0 F1.0/1 RF1.1<0 F1.1/1")


def test_a_computation_waits_for_its_message_and_messages_run_beside_computations():
    events = run(PIPELINE, uniform(shape_of(2), f=2, send=1), *FORWARD)
    assert span(events[0, "SF0.0>1"]) == span(events[1, "RF1.0<0"]) == (2, 3)
    assert span(events[0, "F0.1/0"]) == (2, 4)
    assert span(events[1, "F1.0/1"]) == (3, 5)
    assert events[0, "SF0.0>1"].resource == events[1, "RF1.0<0"].resource == "0→1 F"


def test_a_message_starts_when_its_receiver_asks_for_it_unless_it_is_buffered():
    costs = uniform(shape_of(2), f=2, send=1)
    late = ("F0.0/0 SF0.0>1", "F1.7/1 F1.8/1 RF1.0<0 F1.0/1")
    assert span(run(PIPELINE, costs, *late)[1, "RF1.0<0"]) == (4, 5)
    assert span(run(PIPELINE, costs, *late, rendezvous=False)[1, "RF1.0<0"]) == (2, 3)


def test_messages_of_one_channel_follow_each_other_and_those_of_the_other_direction_do_not_wait():
    costs = uniform(shape_of(2), f=1, send=5)
    both = ("RB0.7<1 F0.0/0 SF0.0>1 F0.1/0 SF0.1>1", "RF1.0<0 RF1.1<0 F1.7/1 SB1.7>0 F1.0/1 F1.1/1")
    events = run(PIPELINE, costs, *both)
    assert span(events[0, "SF0.0>1"]) == (1, 6)
    assert span(events[0, "SF0.1>1"]) == (6, 11)
    assert span(events[1, "SB1.7>0"]) == (1, 6)


def test_a_message_takes_the_latency_and_the_bytes_of_the_cut():
    costs = replace(uniform(shape_of(2)), cut_bytes=(300, 0), links={(0, 1): Link(0.5, 100.0)})
    assert run(PIPELINE, costs, *FORWARD)[0, "SF0.0>1"].seconds == 3.5


def test_collectives_begin_when_all_members_have_issued_them_and_hide_behind_computations():
    plan = plan_of(dp=2, zero=0)
    costs = replace(uniform(shape_of(1)), buckets=(BucketCosts(gradient_bytes=100),), group_link=Link(0, 10.0))
    events = run(plan, costs, "F0.0/0 R0.0/0 F0.1/0 NORM STEP", "F0.0/0 F0.1/0 R0.0/0 F0.2/0 NORM STEP")
    assert span(events[0, "R0.0/0"]) == span(events[1, "R0.0/0"]) == (2, 12)  # 2 · ½ of 100 bytes at 10 per second
    assert span(events[1, "F0.2/0"]) == (2, 3)
    norm = 3 * 8 / 10
    assert span(events[0, "NORM"]) == pytest.approx((12, 12 + norm))
    assert events[0, "STEP"].start == pytest.approx(12 + norm)


@pytest.mark.parametrize(
    ("zero", "degree", "seconds"),
    # Bytes 80 over 4 replicas at 1 byte a second, with 1 s latency, in a ring:
    [
        (0, 0, [2 * 3 * (1 + 20)]),  # all-reduce
        (1, 0, [3 * (1 + 20)]),  # every rank needs its shard only
        (2, 2, [1 + 40, 2 * (1 + 20)]),  # scattered over two, then 40 bytes summed between two
    ],
)
def test_gradients_take_the_time_of_a_ring(zero: int, degree: int, seconds: list[float]):
    plan = Plan(dp=4, zero=zero, zero_degree=degree, stages=(1,))
    costs = replace(uniform(shape_of(1)), buckets=(BucketCosts(gradient_bytes=80),), group_link=Link(1, 1.0))
    timeline = simulate(plan, shape_of(1), lower(plan, shape_of(1)), costs)
    events = [event for event in timeline.events if event.rank == 0 and event.instruction.op in (Op.REDUCE, Op.SUM)]
    assert [event.seconds for event in events] == seconds
    assert events[0].end == events[-1].start or len(events) == 1


def test_a_computation_waits_for_its_gathered_parameters_and_updated_ones_are_shared_after_the_step():
    plan = Plan(dp=2, zero=1, stages=(1,))
    bucket = BucketCosts(weight_bytes=10, step_seconds=6)
    costs = replace(uniform(shape_of(1)), buckets=(bucket,), links={(0, 1): Link(0, 1.0)})
    program = "G0.0/0 F0.0/0 X0.0/0 STEP P/0"
    events = run(plan, costs, program, program)
    assert span(events[0, "F0.0/0"]) == (5, 6)
    assert span(events[0, "STEP"]) == (6, 9)  # a half of the parameters
    assert span(events[0, "P/0"]) == (9, 14)


def test_the_gradients_of_tied_parameters_are_summed_after_their_reduction_and_before_the_norm():
    plan, shape = plan_of(pp=2, dp=2), shape_of(2, shared=((0, 1),))
    buckets = (BucketCosts(), BucketCosts(), BucketCosts(gradient_bytes=10))
    costs = replace(uniform(shape), buckets=buckets, group_link=Link(0, 1.0))
    timeline = simulate(plan, shape, lower(plan, shape), costs)
    for rank in range(4):
        by_op = {e.instruction.op: e for e in timeline.events if e.rank == rank and e.instruction.block in (2, None)}
        assert by_op[Op.REDUCE].end <= by_op[Op.TIE].start
        assert by_op[Op.TIE].end <= by_op[Op.NORM].start < by_op[Op.NORM].end == by_op[Op.STEP].start
        assert by_op[Op.TIE].seconds == 10


def test_the_loss_waits_for_the_number_of_items():
    plan = plan_of(dp=2)
    costs = replace(uniform(shape_of(1)), group_link=Link(3, 8.0))
    assert run(plan, costs, "COUNT F0.0/0", "COUNT F0.0/0")[0, "F0.0/0"].start == 2 * (3 + 0.5)


def test_programs_that_wait_for_each_other_are_refused():
    crossed = ("RB0.0<1 BW0.0/0 SF0.0>1", "RF1.0<0 F1.0/1 SB1.0>0")
    with pytest.raises(AssertionError, match=r"wait for each other at .*BW0\.0/0 of rank 0"):
        run(PIPELINE, uniform(shape_of(2)), *crossed)


sizes = st.integers(1, 8).flatmap(lambda p: st.tuples(st.just(p), st.integers(p, 16)))
times = st.integers(1, 5)


@given(sizes, st.sampled_from(["gpipe", "1f1b"]), times, times, times)
@settings(deadline=None)
def test_the_bubble_of_gpipe_and_1f1b_is_the_closed_form(size: tuple[int, int], schedule: str, f: int, b: int, w: int):
    p, m = size
    timeline = timeline_of(plan_of(p, mb=m, schedule=schedule), f, b, w)
    assert timeline.makespan == (m + p - 1) * (f + b + w)
    for rank in range(p):
        assert timeline.bubble(rank) == pytest.approx((p - 1) / (m + p - 1))


@given(st.integers(2, 8), st.integers(1, 4), st.integers(2, 4), times)
@settings(deadline=None, max_examples=40)
def test_virtual_stages_divide_the_bubble_when_micro_batches_are_a_multiple_of_ranks(p: int, n: int, v: int, f: int):
    m = p * min(n, 16 // p)
    timeline = timeline_of(plan_of(p, mb=m, schedule="interleaved", v=v), f, f, f)
    for rank in range(p):
        assert timeline.bubble(rank) == pytest.approx((p - 1) / (v * m + p - 1))


@given(st.integers(1, 8), st.integers(0, 8), times, times, times)
@settings(deadline=None, max_examples=60)
def test_zb_h1_idles_for_a_forward_and_a_backward_less_a_weight_gradient_per_further_stage(
    p: int, more: int, f: int, b: int, w: int
):
    """With enough micro-batches, and weight gradients that fit into the gaps they are to fill."""
    m, w = 2 * p - 1 + more, min(f, b, w)
    timeline = timeline_of(plan_of(p, mb=m, schedule="zb-h1"), f, b, w)
    idle = (p - 1) * (f + b - w)
    for rank in range(p):
        assert timeline.bubble(rank) == pytest.approx(idle / (m * (f + b + w) + idle))


@given(st.integers(2, 6), st.integers(1, 12), times, times, st.floats(0, 0.5))
@settings(deadline=None, max_examples=60)
def test_eager_1f1b_waits_for_messages_only_while_it_fills_and_drains(p: int, m: int, f: int, b: int, part: float):
    """However many micro-batches there are, if a message is not longer than half of one's computation."""
    send = part * (f + b)
    eager = timeline_of(plan_of(p, mb=m, schedule="eager-1f1b"), f, b, 0, send=send)
    assert eager.makespan == pytest.approx((m + p - 1) * (f + b) + 2 * (p - 1) * send)
    assert eager.makespan <= timeline_of(plan_of(p, mb=m, schedule="1f1b"), f, b, 0, send=send).makespan


@given(
    st.sampled_from(["gpipe", "1f1b", "eager-1f1b", "interleaved", "zb-h1", "zb-v"]),
    st.integers(2, 4),
    st.integers(1, 8),
    st.integers(1, 2),
    st.integers(0, 3),
    st.sampled_from([0, 0.25]),
)
@settings(deadline=None, max_examples=60)
def test_every_lowered_program_can_be_simulated(schedule: str, p: int, m: int, dp: int, zero: int, send: float):
    plan = plan_of(p, dp, m, schedule, v=2 if schedule == "interleaved" else 0, zero=zero if dp > 1 else 0)
    timeline = timeline_of(plan, send=send)
    path = timeline.critical_path()
    assert len(timeline.events) >= sum(map(len, lower(plan, shape_of(plan.num_stages))))
    assert path[0].start == 0 and path[-1].end == timeline.makespan
    assert all(before.end == after.start for before, after in pairwise(path)), "what it waited for ended just then"
    for rank in timeline.ranks:
        computed = [event for event in timeline.events if event.rank == rank and event.resource == "compute"]
        assert all(before.end <= after.start for before, after in pairwise(computed))
        assert timeline.busy(rank) == plan.mb * plan.v * 3


def test_an_evaluation_can_be_simulated_and_keeps_no_activations():
    plan = plan_of(2, mb=3)
    shape = shape_of(2)
    timeline = simulate(plan, shape, lower_forward(plan, shape, 3), uniform(shape))
    assert timeline.makespan == 4
    assert [timeline.peak_memory(rank) for rank in (0, 1)] == [0, 0]
