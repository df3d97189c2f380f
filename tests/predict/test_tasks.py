"""Work and rates: what shares nothing ends after the longest way to it, what shares a place loses what the tables say,
and no work is lost or made."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.plan.plan import Plan
from phalanx.predict.contention import DEVICE, Contention, Use, Work
from phalanx.predict.costs import Costs, Link, seconds_at, uniform
from phalanx.predict.simulate import simulate
from phalanx.predict.tasks import Task, Times, run
from phalanx.predict.timeline import COMPUTE
from phalanx.program.compile import compile_plan
from phalanx.program.instructions import Op
from phalanx.program.shape import ModelShape
from tests.program.random_plans import cases, chain, simple_shape

COMPUTING, MOVING = (Work.COMPUTE, Work.COMPUTE), (Work.TRANSFER, Work.TRANSFER)
SPEEDS = st.lists(st.floats(0.2, 1.0), min_size=1, max_size=3).map(tuple)
KINDS = [(a, b) for a in Work for b in Work]


def on(device: int, work: Work = Work.COMPUTE) -> tuple[Use, ...]:
    return (((DEVICE, device), work),)


def shared(*speeds: float) -> Contention:
    return Contention((0,), (), {COMPUTING: speeds})


@st.composite
def graphs(draw: st.DrawFn) -> list[Task]:
    """Tasks that wait for earlier ones, on a few devices."""
    found: list[Task] = []
    for number in range(draw(st.integers(1, 12))):
        needs = draw(st.sets(st.integers(0, number - 1), max_size=3)) if number else set[int]()
        uses = on(draw(st.integers(0, 2)), draw(st.sampled_from(list(Work))))
        found.append(Task("", needs=sorted(needs), seconds=draw(st.floats(0, 9)), uses=uses))
    return found


contentions = st.dictionaries(st.sampled_from(KINDS), SPEEDS).map(lambda beside: Contention((0, 1, 2), (), beside))


def longest_way(tasks: list[Task]) -> list[float]:
    ends: list[float] = []
    for task in tasks:
        ends.append(max((ends[need] for need in task.needs), default=0.0) + task.seconds)
    return ends


@given(graphs())
def test_what_nothing_slows_ends_after_the_longest_way(tasks: list[Task]) -> None:
    ends = longest_way(tasks)
    assert run([replace(task, uses=()) for task in tasks], Contention()).end == ends
    assert run(tasks, Contention((0, 1, 2))).end == pytest.approx(ends)


@given(graphs(), contentions)
def test_nothing_ends_earlier_because_others_run_beside_it(tasks: list[Task], contention: Contention) -> None:
    times = run(tasks, contention)
    assert all(end >= alone - 1e-9 for end, alone in zip(times.end, longest_way(tasks), strict=True))
    for begin, task in zip(times.begin, tasks, strict=True):
        assert begin == max((times.end[need] for need in task.needs), default=0.0)


@given(graphs(), contentions)
def test_every_task_does_its_work_at_the_rates_of_those_beside_it(tasks: list[Task], contention: Contention) -> None:
    times = run(tasks, contention)
    for number, task in enumerate(tasks):
        assert work_done(tasks, times, contention, number) == pytest.approx(task.seconds, rel=1e-6, abs=1e-9)


def work_done(tasks: list[Task], times: Times, contention: Contention, number: int) -> float:
    """From moment to moment: the rate beside whatever else runs there then."""
    ((place, work),) = tasks[number].uses
    moments = sorted({*times.begin, *times.end})
    done = 0.0
    for begin, end in pairwise(moments):
        beside = [i for i in range(len(tasks)) if times.begin[i] <= begin and times.end[i] >= end]
        if number in beside:
            there = [tasks[i].uses[0][1] for i in beside if i != number and tasks[i].uses[0][0] == place]
            done += (end - begin) * contention.speed(place, work, {kind: there.count(kind) for kind in Work})
    return done


@given(graphs(), contentions, st.floats(0.1, 10))
def test_twice_the_work_takes_twice_as_long(tasks: list[Task], contention: Contention, factor: float) -> None:
    scaled = [replace(task, seconds=factor * task.seconds) for task in tasks]
    assert run(scaled, contention).end == pytest.approx([factor * end for end in run(tasks, contention).end])


def test_three_on_a_device_that_divides_itself_share_it_until_the_short_ones_have_ended() -> None:
    tasks = [Task("", seconds=seconds, uses=on(0)) for seconds in (1.0, 2.0, 4.0)]
    assert run(tasks, shared(1 / 2, 1 / 3)).end == pytest.approx([3, 5, 7])


def test_beside_more_than_were_measured_is_beside_as_many_as_were() -> None:
    tasks = [Task("", seconds=1.0, uses=on(0)) for _ in range(4)]
    assert run(tasks, shared(0.5)).end == pytest.approx([2, 2, 2, 2])


def test_a_transfer_gets_on_as_fast_as_its_slowest_end() -> None:
    beside = Contention((0, 1), (), {(Work.TRANSFER, Work.COMPUTE): (0.5,)})
    both = (*on(0, Work.TRANSFER), *on(1, Work.TRANSFER))
    tasks = [Task("", seconds=4.0, uses=both), Task("", seconds=2.0, uses=on(1))]
    assert run(tasks, beside).end == pytest.approx([5, 2])  # two seconds at half its speed


def test_a_network_is_divided_among_the_transfers_between_nodes() -> None:
    contention = Contention((0, 1, 2, 3), (0, 0, 1, 1))
    assert contention.networks((0, 1)) == ()
    there, back = contention.networks((0, 2), True), contention.networks((2, 0), True)
    assert run([Task("", seconds=1.0, uses=there)] * 2, contention).end == pytest.approx([2, 2])
    assert run([Task("", seconds=1.0, uses=own) for own in (there, back)], contention).end == pytest.approx([1, 1])
    both_ways = contention.networks((0, 1, 2, 3))
    assert run([Task("", seconds=1.0, uses=own) for own in (both_ways, back)], contention).end == pytest.approx([2, 2])


@given(cases())
def test_a_step_without_contention_is_the_same_step(case: tuple[Plan, ModelShape]) -> None:
    plan, shape = case
    costs = uniform(shape, send=0.25)
    compiled = compile_plan(plan, shape)
    apart = replace(costs, contention=Contention(tuple(range(plan.world)), (), {COMPUTING: (0.5,)}))
    assert simulate(compiled, apart).makespan == pytest.approx(simulate(compiled, costs).makespan)


def halved(plan: Plan, costs: Costs) -> Costs:
    """All ranks on one device that is divided equally."""
    speeds = tuple(1 / (n + 1) for n in range(1, plan.world))
    return replace(costs, contention=Contention((0,) * plan.world, (), {COMPUTING: speeds}))


def test_ranks_of_one_device_take_as_long_as_all_their_work() -> None:
    plan, shape = Plan.parse("pp=2,mb=3,stages=1-1"), simple_shape(2)
    timeline = simulate(compile_plan(plan, shape), halved(plan, uniform(shape)))
    assert timeline.makespan == pytest.approx(2 * 3 * 3)  # never idle: F, B and W of three micro-batches on two stages


def test_replicas_that_share_a_device_are_all_simulated() -> None:
    plan, shape = Plan.parse("dp=2,stages=2"), simple_shape(2)
    costs = uniform(shape)
    assert simulate(compile_plan(plan, shape), halved(plan, costs)).makespan == pytest.approx(
        2 * simulate(compile_plan(plan, shape), costs).makespan
    )


def test_messages_beneath_computation_take_longer() -> None:
    plan, shape = Plan.parse("pp=2,mb=4,stages=1-1"), simple_shape(2)
    alone = uniform(shape, send=0.5)
    slowed = replace(alone, contention=Contention((0, 1), (), {(Work.TRANSFER, Work.COMPUTE): (0.5,)}))
    found = simulate(compile_plan(plan, shape), slowed)
    sent = [e.seconds for e in found.events if e.instruction.op in (Op.SEND_F, Op.SEND_B) and e.resource != COMPUTE]
    assert min(sent) >= 0.5 and max(sent) == pytest.approx(1.0)


LISTENING = Contention((0, 1), (), {(Work.COMPUTE, Work.LISTEN): (0.5,)})


def test_who_listens_does_so_until_what_it_listens_to_begins() -> None:
    """The message waits for its sender, who computes for three seconds; its receiver computes at half its speed until
    then."""
    tasks = [
        Task("", seconds=3.0, uses=on(0)), Task("", needs=[0], seconds=1.0), Task("", seconds=2.0, uses=on(1)),
        Task("", uses=on(1, Work.LISTEN), until=1),
    ]  # fmt: skip
    found = run(tasks, LISTENING)
    assert found.end == pytest.approx([3, 4, 3.5, 3]) and found.begin[1] == 3


def test_who_asks_for_what_has_begun_to_come_does_not_listen() -> None:
    tasks = [Task("", seconds=1.0), Task("", needs=[0], uses=on(0, Work.LISTEN), until=2), Task("", seconds=5.0)]
    assert run([*tasks, Task("", seconds=4.0, uses=on(0))], LISTENING).end == pytest.approx([1, 1, 5, 4])


@given(cases())
def test_ranks_that_listen_compute_slower_and_those_without_messages_as_before(case: tuple[Plan, ModelShape]) -> None:
    plan, shape = case
    costs = uniform(shape, send=0.25)
    compiled = compile_plan(plan, shape)
    devices = tuple(range(plan.world))
    alone = simulate(compiled, replace(costs, contention=Contention(devices, (), {COMPUTING: (1.0,)}))).makespan
    slowed = Contention(devices, (), {(Work.COMPUTE, Work.LISTEN): (0.5,)})
    found = simulate(compiled, replace(costs, contention=slowed)).makespan
    assert alone - 1e-9 <= found <= 2 * alone + 1e-9
    if plan.pp == 1:
        assert found == pytest.approx(alone)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "eager-1f1b", "zb-h1"])
def test_of_messages_that_come_one_after_the_other_only_the_first_is_listened_to(schedule: str) -> None:
    """Four ranks have six channels: never do more than six listen, however many messages were asked for."""
    plan, shape = Plan.parse(f"pp=4,mb=8,stages=1-1-1-1,schedule={schedule}"), simple_shape(4)
    costs, compiled = uniform(shape, send=0.25), compile_plan(plan, shape)

    def step(speeds: tuple[float, ...]) -> float:
        contention = Contention((0,) * 4, (), {(Work.COMPUTE, Work.LISTEN): speeds})
        return simulate(compiled, replace(costs, contention=contention)).makespan

    assert step((1.0,) * 6 + (0.1,)) == step((1.0,)) < step((0.5,))


# What was measured of transfers, and what a step takes besides.


def test_a_curve_is_followed_between_its_points_and_beyond_the_last() -> None:
    curve = ((10.0, 1.0), (20.0, 2.0), (40.0, 3.0))
    assert [seconds_at(curve, size) for size in (1, 10, 15, 30, 60)] == [1.0, 1.0, 1.5, 2.5, 4.0]
    assert seconds_at(((10.0, 1.0),), 50) == 1.0


def test_measured_transfers_stand_before_default_links_and_behind_single_ones() -> None:
    curves = {("send", 2): ((0.0, 1.0), (10.0, 2.0)), ("all_reduce", 2): ((0.0, 7.0),)}
    costs = replace(uniform(simple_shape(2)), transfers=curves, links={(2, 3): Link(0.5)}, group_link=Link(3.0))
    assert costs.message(0, 1, 5.0) == 1.5 and costs.message(2, 3, 5.0) == 0.5
    assert costs.collective("all_reduce", (0, 1), 4) == 7 and costs.collective("all_reduce", (2, 3), 4) == 1.0
    assert costs.collective("all_gather", (0, 1), 4) == 3.0


def test_micro_batches_and_steps_take_some_time_besides() -> None:
    plan, shape = Plan.parse("mb=3,stages=2"), chain(2, "0")
    costs = replace(uniform(shape), dims={"batch": 1})
    more = replace(costs, input_seconds=0.5, step_seconds=2.0)
    compiled = compile_plan(plan, shape)
    assert simulate(compiled, more).makespan == pytest.approx(simulate(compiled, costs).makespan + 3 * 0.5 + 2)
