"""Offload in programs: what leaves after the forward comes back before the backward, its memory is free in between, and
nothing else changes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from phalanx.errors import PlanError
from phalanx.observe.program_text import bars_of, lanes_of
from phalanx.plan.offload import spread, take_offload
from phalanx.plan.plan import Plan
from phalanx.predict.costs import BucketCosts, Costs, Link, uniform
from phalanx.predict.memory import Sizes
from phalanx.predict.simulate import simulate
from phalanx.program.check import check
from phalanx.program.compile import CompiledPlan, compile_forward, compile_plan
from phalanx.program.instructions import COMPUTE, MOVES, Op, from_text, is_fetch, to_text
from phalanx.program.lower import lower
from phalanx.program.shape import ModelShape
from phalanx.program.values import Table
from tests.program.lives import live_bytes
from tests.program.random_plans import cases, chain, simple_shape
from tests.program.sliced_plans import Case, sliced_cases
from tests.program.tensor_shapes import chained_cases, tensor_cases

SIZED = chain(6, "10", saved="100")


@st.composite
def offloaded(draw: st.DrawFn) -> Case:
    """Any plan of which something can be moved."""
    plan, shape = draw(cases() | chained_cases() | tensor_cases() | sliced_cases())
    words = draw(st.sampled_from(["activations", "activations:1", "optimizer:0.5", "optimizer-step"]))
    more = draw(st.sampled_from(["", "+optimizer", "+optimizer-step:0.6"])) if "activations" in words else ""
    words = draw(st.sampled_from([words + more, "parameters", "parameters:1", "activations+parameters+optimizer-step"]))
    try:
        moved = replace(plan, mb=min(plan.mb, 4), offload=take_offload(words))
    except PlanError:
        moved = replace(plan, mb=min(plan.mb, 4), offload=take_offload("activations"))
    if draw(st.booleans()):
        sizes = st.integers(1, 9) | st.integers(20, 90)
        shape = replace(shape, elements=tuple(draw(sizes) for _ in range(shape.num_buckets)))
    try:
        lower(moved, shape)
    except PlanError:
        assume(False)
    return moved, shape


def costs_of(shape: ModelShape, **changes: object) -> Costs:
    return replace(uniform(shape), **changes)  # pyright: ignore


def live(compiled: CompiledPlan, *, on_host: bool = False) -> dict[str, int]:
    found = live_bytes(compiled.tables[0], Sizes.of(compiled, costs_of(compiled.shape)), on_host=on_host)
    return dict(zip(map(str, compiled.programs[0]), found, strict=True))


@given(offloaded())
def test_moves_are_added_to_the_programs_of_any_plan_and_what_moves_is_on_one_side_only(case: Case) -> None:
    plan, shape = case
    compiled = compile_plan(plan, shape)  # which checks it
    for program, plain in zip(compiled.programs, lower(replace(plan, offload=()), shape), strict=True):
        moves = [it for it in program if it.op in MOVES or (it.op is Op.STEP and it.block is not None)]
        assert tuple(it for it in program if it not in moves) == plain
        assert from_text(to_text(program)) == program
    for table in compiled.tables:
        at = {row.instruction: position for position, row in enumerate(table.rows)}
        read = {i for row in table.rows for i in row.reads}
        # Random models have redistributions whose result nobody reads: their sources are held until the end.
        moved = [row for row in table.rows if row.instruction.op not in COMPUTE]
        ends_late = {i for row in moved if not read.issuperset(row.writes) for i in row.reads}
        for it, left in at.items():
            if it.op is Op.OUT and it.stage is not None and not ends_late & set(table.rows[left].reads):
                back = at[it._replace(op=Op.IN)]
                freed = [p for p, row in enumerate(table.rows) if set(table.rows[left].reads) & set(row.frees)]
                assert left < max(freed) < back


def test_bytes_on_the_device_fall_by_what_lies_on_the_host() -> None:
    plain, moved = (
        live(compile_plan(Plan.parse(text), SIZED)) for text in ("stages=6", "stages=6,offload=activations")
    )
    host = live(compile_plan(Plan.parse("stages=6,offload=activations"), SIZED), on_host=True)
    # Of four blocks: what each saved and, but for the first, what it was given.
    assert host["F0.0/5"] == 4 * 100 + 3 * 10 and plain["F0.0/5"] - moved["F0.0/5"] == host["F0.0/5"]
    assert host["BW0.0/0"] == 0
    assert max(moved.values()) < max(plain.values())


def test_of_a_forward_that_is_done_again_the_inputs_of_blocks_move() -> None:
    table = compile_plan(Plan.parse("recompute=block,stages=6,offload=activations"), SIZED).tables[0]
    moved = {str(table.values[i]) for row in table.rows if row.instruction.op is Op.OUT for i in row.reads}
    assert moved == {f"activation(h{n}).0" for n in (1, 2, 3)}


def test_so_many_layers_of_each_stage_are_spread_over_it_and_other_blocks_stay() -> None:
    assert spread((1, 2, 3, 4, 5, 6), 2) == (1, 4) and spread((1, 2, 3, 4, 5), 3) == (1, 2, 4)
    assert spread((1, 2), 0) == (1, 2) and spread((), 3) == ()
    shape = replace(chain(10, "10", saved="100"), layers=tuple(range(1, 9)))
    program = compile_plan(Plan.parse("pp=2,mb=2,stages=5-5,offload=activations:2"), shape).programs
    left = [{it.block for it in own if it.op is Op.OUT} for own in program]
    assert left == [{1, 3}, {5, 7}]


def test_a_layer_whose_backward_follows_at_once_stays() -> None:
    program = compile_plan(Plan.parse("stages=6,offload=activations"), SIZED).programs[0]
    assert {it.block for it in program if it.op is Op.OUT} == {0, 1, 2, 3}


@pytest.mark.parametrize(("text", "shape", "message", "hint"), [
    ("stages=2,offload=activations", simple_shape(2), "moves no activations: in every stage", "more blocks"),
    ("stages=6,offload=activations:7", SIZED, "is for 7 layers per stage: the stage with most layers has 6",
     "use activations:6 or less, or activations for all layers"),
])  # fmt: skip
def test_what_cannot_move_is_refused(text: str, shape: ModelShape, message: str, hint: str) -> None:
    with pytest.raises(PlanError) as refused:
        compile_plan(Plan.parse(text), shape)
    assert message in refused.value.message and hint in refused.value.hint


def test_an_evaluation_moves_no_activations() -> None:
    compiled = compile_forward(Plan.parse("stages=6,offload=activations"), SIZED, 2)
    assert not any(it.op in MOVES for it in compiled.programs[0])


# The optimizer.

BUCKETS = replace(simple_shape(3), elements=(250, 100, 100))


def lines(text: str, shape: ModelShape = BUCKETS) -> str:
    """The update, from the first OUT, IN or NORM of it."""
    program = compile_plan(Plan.parse(f"{text},stages={shape.num_blocks}"), shape).programs[0]
    update = [it for it in program if it.op in (Op.NORM, Op.STEP, Op.SHARE) or (it.op in MOVES and it.stage is None)]
    return to_text(update)


def test_state_comes_to_the_device_part_by_part_and_one_part_ahead() -> None:
    parts = "IN/0:0 NORM IN/0:1 STEP/0:0 OUT/0:0 IN/0:2 STEP/0:1 OUT/0:1 IN/1:0 STEP/0:2 OUT/0:2"
    assert lines("offload=optimizer") == f"{parts} IN/2:0 STEP/1:0 OUT/1:0 STEP/2:0 OUT/2:0 STEP"
    compiled = compile_plan(Plan.parse("offload=optimizer,stages=3"), BUCKETS)
    assert compiled.tables[0].peak("staged") == 3


def test_gradients_leave_as_they_are_complete_and_the_host_updates_in_the_order_of_the_forward() -> None:
    assert lines("offload=optimizer-step") == (
        "OUT/2 OUT/1 OUT/0 NORM STEP/0:0 STEP/0:1 STEP/0:2 STEP/1:0 STEP/2:0 STEP"
    )
    tied = replace(simple_shape(3, (0, 2)), elements=(10, 10, 10, 10))
    assert lines("offload=optimizer-step", tied).endswith("NORM STEP/0:0 STEP/3:0 STEP/1:0 STEP/2:0 STEP")
    program = to_text(compile_plan(Plan.parse("dp=2,offload=optimizer-step,stages=3"), BUCKETS).programs[0])
    assert "BW0.0/1 R0.0/1 OUT/2 BW0.0/0 R0.0/0 OUT/1 OUT/0 NORM" in program  # not before they are reduced


def test_gradients_that_left_are_not_on_the_device_any_more() -> None:
    costs = replace(uniform(BUCKETS), buckets=(BucketCosts(100, 200, 600),) * 3)
    compiled = compile_plan(Plan.parse("offload=optimizer-step,stages=3"), BUCKETS)
    size = Sizes.of(compiled, costs)
    device, host = live_bytes(compiled.tables[0], size), live_bytes(compiled.tables[0], size, on_host=True)
    at = [str(it) for it in compiled.programs[0]].index("NORM")
    assert (device[at], host[at]) == (0, 600)
    held = simulate(compiled, costs).memory[0]
    assert held["masters"] == held["moments"] == 0


@pytest.mark.parametrize(("text", "hosted"), [("0.5", {1, 2, 4}), ("0.34", {1, 4}), ("1", set(range(6)))])
def test_the_share_on_the_host_is_spread_over_the_buckets_and_the_first_stays(text: str, hosted: set[int]) -> None:
    program = compile_plan(Plan.parse(f"stages=6,offload=optimizer:{text}"), simple_shape(6)).programs[0]
    assert {it.block for it in program if it.op is Op.IN} == hosted


def test_a_share_that_is_less_than_any_bucket_is_refused() -> None:
    with pytest.raises(PlanError) as refused:
        compile_plan(Plan.parse("stages=2,offload=optimizer:0.01"), simple_shape(2))
    assert "keeps nothing of the optimizer on the host: the state of whole buckets lies there" in refused.value.message
    assert "use a larger share" in refused.value.hint


def test_ranks_that_keep_the_same_bucket_update_it_alike() -> None:
    tied = replace(simple_shape(3, (0, 2)), elements=(1, 50, 60, 40))
    programs = compile_plan(Plan.parse("pp=2,mb=2,stages=2-1,offload=optimizer-step:0.5"), tied).programs
    assert len({any(it.op is Op.OUT and it.block == 3 for it in program) for program in programs}) == 1


def test_the_hosts_update_runs_beside_the_ranks_own() -> None:
    costs = replace(uniform(BUCKETS), buckets=(BucketCosts(host_step_seconds=2.0, step_seconds=1.0),) * 3)
    events = simulate(compile_plan(Plan.parse("offload=optimizer-step,stages=3"), BUCKETS), costs).events
    assert {e.resource for e in events if e.instruction.block is not None and e.instruction.op is Op.STEP} == {
        "host of 0"
    }
    streamed = simulate(compile_plan(Plan.parse("offload=optimizer,stages=3"), BUCKETS), costs)
    assert streamed.makespan == pytest.approx(9.0 + 3.0)


# Parameters.


def program_of(text: str, shape: ModelShape = BUCKETS) -> str:
    return to_text(compile_plan(Plan.parse(f"{text},stages={shape.num_blocks}"), shape).programs[0])


def test_parameters_come_one_block_ahead_and_stay_where_the_next_use_needs_them_too() -> None:
    assert program_of("offload=parameters:1", simple_shape(2)).startswith("COUNT I.0 IN/0 F0.0/0 F0.0/1 IN/0 BW0.0/1")
    text = "COUNT I.0 IN/0 IN/1 F0.0/0 IN/2 F0.0/1 F0.0/2 IN/1 BW0.0/2 OUT/2 IN/0 BW0.0/1 OUT/1 BW0.0/0 OUT/0"
    assert program_of("offload=parameters+optimizer-step").startswith(f"{text} NORM STEP/0:0")


def test_state_and_gradients_of_what_lies_on_the_host_come_with_each_other() -> None:
    assert lines("offload=parameters:1", simple_shape(2)) == "IN/0 IN/0 OUT/0 IN/0:0 NORM STEP/0:0 OUT/0:0 STEP"
    table = compile_plan(Plan.parse("offload=parameters:1,stages=2"), simple_shape(2)).tables[0]
    rows = {str(row.instruction): row for row in table.rows}
    assert table.named(rows["IN/0:0"].reads) == ["host.state(0:0)", "host.d_parameters(0)"]
    assert table.named(rows["OUT/0:0"].adds) == ["host.state(0:0)", "host.parameters(0)"]
    assert "host.d_parameters(0)" in table.named(rows["STEP/0:0"].frees)


def test_a_shard_comes_from_the_host_before_it_is_gathered_and_leaves_when_it_was() -> None:
    text = "COUNT I.0 IN/0 IN/1 IN/2 G0.0/0 G0.0/1 F0.0/0 G0.0/2 F0.0/1 IN/1 F0.0/2 IN/0 G0.0/1 BW0.0/2"
    assert program_of("dp=2,zero=3,offload=parameters").startswith(text)
    compiled = compile_plan(Plan.parse("dp=2,zero=3,stages=3,offload=parameters"), BUCKETS)
    size = Sizes.of(compiled, replace(uniform(BUCKETS), buckets=(BucketCosts(100, 200, 0, 400),) * 3))
    table = compiled.tables[0]
    assert {size(value) for value in table.values if value.kind == "fetched"} == {50}
    gathers = [row for row in table.rows if row.instruction.op is Op.GATHER]
    assert all(table.values[i].kind == "fetched" for row in gathers for i in row.reads)
    assert all(_num_live(table, "fetched", str(bucket)) == 1 for bucket in range(3))


def _num_live(table: Table, kind: str, what: str) -> int:
    """Versions of a value that exist at once, at most."""
    of = {i for i, value in enumerate(table.values) if (value.kind, value.what) == (kind, what)}
    now = most = 0
    for row in table.rows:
        now += len(of.intersection(row.writes))
        most = max(most, now)
        now -= len(of.intersection(row.frees))
    return most


def test_of_some_layers_those_of_each_rank_are_spread_over_it_with_what_only_they_use() -> None:
    shape = replace(simple_shape(6, (1, 4)), layers=(1, 2, 3, 4))
    programs = compile_plan(Plan.parse("pp=2,mb=2,stages=3-3,offload=parameters:1"), shape).programs
    assert [{it.block for it in own if is_fetch(it)} for own in programs] == [{1}, {3}]
    everything = compile_plan(Plan.parse("pp=2,mb=2,stages=3-3,offload=parameters"), shape).programs
    assert [{it.block for it in own if is_fetch(it)} for own in everything] == [{0, 1, 2, 6}, {3, 4, 5, 6}]


def test_an_evaluation_fetches_parameters() -> None:
    program = compile_forward(Plan.parse("stages=3,offload=activations+parameters+optimizer-step"), BUCKETS, 1).programs
    assert to_text(program[0]) == "I.0 IN/0 IN/1 F0.0/0 IN/2 F0.0/1 F0.0/2"


@pytest.mark.parametrize(("zero", "fetches"), [("", 3 + 2), ("dp=2,zero=3,", 3 + 2)])
def test_block_by_block_parameters_cross_the_link_once_for_all_micro_batches(zero: str, fetches: int) -> None:
    """Forward and backward; what the last block had is there still."""
    plan = "mb=4,schedule=block-major,v=3,stages=1-1-1,offload=parameters+optimizer-step"
    program = compile_plan(Plan.parse(zero + plan), BUCKETS).programs[0]
    assert sum(map(is_fetch, program)) == fetches
    by_micro_batch = Plan.parse(f"{zero}mb=4,stages=3,offload=parameters+optimizer-step")
    assert sum(map(is_fetch, compile_plan(by_micro_batch, BUCKETS).programs[0])) == 4 * 4 + 1
    left = [position for position, it in enumerate(program) if it.op is Op.OUT]
    done = [max(p for p, it in enumerate(program) if it.op is Op.BW and it.block == bucket) for bucket in (2, 1, 0)]
    assert zero or [position - 1 for position in left] == done  # as soon as their block is


def test_on_the_device_are_parameters_and_gradients_of_two_blocks() -> None:
    costs = replace(uniform(BUCKETS), buckets=(BucketCosts(100, 200, 0, 800),) * 3)
    plan = Plan.parse("mb=2,schedule=block-major,v=3,stages=1-1-1,offload=parameters+optimizer-step")
    compiled = compile_plan(plan, BUCKETS)
    device = live_bytes(compiled.tables[0], Sizes.of(compiled, costs))
    at = {str(it): position for position, it in enumerate(compiled.programs[0])}
    saved = 1  # of every forward
    assert device[at["F0.0/0"]] == 2 * 100 + saved and device[at["F2.1/2"]] == 100 + 6 * saved
    assert device[at["NORM"]] == 0 and 2 * 100 + 200 < max(device) <= 2 * (100 + 200) + 6 * saved
    held = simulate(compiled, costs).memory[0]
    assert held["parameters"] == held["moments"] == 0 and held["fetched"] <= 200
    streamed = compile_plan(replace(plan, offload=take_offload("parameters")), BUCKETS)
    size = Sizes.of(streamed, costs)
    values = {str(value): size(value) for value in streamed.tables[0].values}
    assert values["staged(1:0)"] == 100 + 200 + 800 and values["host.state(1:0)"] == 100 + 800
    assert values["staged(0:0)"] == -(-1100 // 3)
    mixed = Sizes.of(streamed, replace(costs, buckets=(BucketCosts(50, 200, 100, 800),) * 3))
    values = {str(value): mixed(value) for value in streamed.tables[0].values}
    assert values["staged(1:0)"] == 100 + 200 + 800 and values["host.state(1:0)"] == 100 + 50 + 800


@pytest.mark.parametrize(("text", "shape", "message", "hint"), [
    ("stages=3,offload=parameters:4", BUCKETS, "is for 4 layers per rank: the most that one has is 3",
     "use parameters:3 or less, or parameters for all blocks"),
    ("stages=2,offload=parameters:1", replace(simple_shape(2, (0, 1)), held=(False, False, True),
     trained=(False, False, True)), "keeps no parameters on the host: the layers that it names have none",
     "use parameters for all blocks"),
])  # fmt: skip
def test_parameters_that_are_not_there_are_refused(text: str, shape: ModelShape, message: str, hint: str) -> None:
    with pytest.raises(PlanError) as refused:
        compile_plan(Plan.parse(text), shape)
    assert message in refused.value.message and hint in refused.value.hint


FETCHED = program_of("offload=parameters+optimizer-step")


@pytest.mark.parametrize(("program", "message"), [
    (FETCHED.replace("IN/1 F0.0/0", "F0.0/0"), "uses fetched(1) before it is written at F0.0/1"),
    (FETCHED.replace("IN/2 ", ""), "uses fetched(2) before it is written at F0.0/2"),
    (FETCHED.replace("IN/1 F0.0/0", "IN/1 IN/2 F0.0/0").replace("IN/2 F0.0/1", "F0.0/1"),
     "has the parameters of 3 blocks fetched, of which 2 are allowed, at IN/2"),
    (FETCHED.replace("F0.0/0", "IN/7 F0.0/0"), "has IN/7, but the parameters of bucket 7 do not lie on its host"),
])  # fmt: skip
def test_a_wrong_fetch_is_found(program: str, message: str) -> None:
    with pytest.raises(PlanError) as refused:
        plan = Plan.parse("stages=3,offload=parameters+optimizer-step")
        check(plan, BUCKETS, [from_text(program)], 1, training=True)
    assert message in refused.value.message


def test_fetches_travel_beside_computation_and_updated_parameters_stay() -> None:
    costs = replace(uniform(BUCKETS), buckets=(BucketCosts(100, 200, host_step_seconds=2.0),) * 3)
    slow, compiled = Link(0, 200.0), compile_plan(Plan.parse("stages=3,offload=parameters+optimizer-step"), BUCKETS)
    events = simulate(compiled, replace(costs, host_link=slow)).events
    fetches = [event for event in events if is_fetch(event.instruction)]
    assert {event.resource for event in fetches} == {"host→0"} and fetches[0].seconds == pytest.approx(0.5)
    assert fetches[2].start == next(e.start for e in events if str(e.instruction) == "F0.0/1")
    update = next(event for event in events if str(event.instruction) == "STEP/1:0")
    assert update.seconds == pytest.approx(2.0)
    below = compile_plan(Plan.parse("stages=3,offload=optimizer-step"), BUCKETS)
    there = [e for e in simulate(below, replace(costs, host_link=slow)).events if str(e.instruction) == "STEP/1:0"]
    assert there[0].seconds == pytest.approx(2.5)


# What is wrong with a program.

GOOD = to_text(lower(Plan.parse("stages=6,offload=activations"), SIZED)[0])


@pytest.mark.parametrize(("program", "message"), [
    (GOOD.replace("IN0.0/2 ", ""), "never runs IN0.0/2"),
    (GOOD.replace("OUT0.0/2 ", ""), "never runs OUT0.0/2"),
    (GOOD.replace("OUT0.0/2 ", "OUT0.0/2 OUT0.0/2 "), "runs OUT0.0/2 twice"),
    (GOOD.replace("IN0.0/1 ", "").replace("BW0.0/1", "BW0.0/1 IN0.0/1"), "which went to the host, at BW0.0/1"),
    (GOOD.replace("OUT0.0/1 ", "").replace("F0.0/1", "OUT0.0/1 F0.0/1"), "before it is written at OUT0.0/1"),
    (GOOD.replace("STEP", "OUT0.1/1 STEP"), "has OUT0.1/1, but there are 1 micro-batches"),
    (GOOD.replace("F0.0/4", "F0.0/4 OUT0.0/4:3"), "has OUT0.0/4:3, but of block 4 nothing is to move there"),
])  # fmt: skip
def test_a_wrong_move_is_found(program: str, message: str) -> None:
    with pytest.raises(PlanError) as refused:
        check(Plan.parse("stages=6,offload=activations"), SIZED, [from_text(program)], 1, training=True)
    assert message in refused.value.message


UPDATE = to_text(lower(Plan.parse("stages=3,offload=optimizer-step"), BUCKETS)[0])


@pytest.mark.parametrize(("program", "message"), [
    (UPDATE.replace("STEP/0:1 ", ""), "never runs STEP/0:1"),
    (UPDATE.replace("OUT/1 ", ""), "never runs OUT/1"),
    (UPDATE.replace("OUT/1 ", "").replace("BW0.0/1", "OUT/1 BW0.0/1"), "before micro-batch 0 has added all"),
    (UPDATE.replace("OUT/0 NORM", "NORM OUT/0"), "before it is written at NORM"),
    (UPDATE.replace("NORM STEP/0:0", "STEP/0:0 NORM"), "has STEP/0:0 before NORM"),
])  # fmt: skip
def test_a_wrong_update_is_found(program: str, message: str) -> None:
    with pytest.raises(PlanError) as refused:
        check(Plan.parse("stages=3,offload=optimizer-step"), BUCKETS, [from_text(program)], 1, training=True)
    assert message in refused.value.message


# Simulated.


def test_copies_travel_beside_computation_each_way_by_itself() -> None:
    plan = Plan.parse("stages=6,offload=activations")
    timeline = simulate(compile_plan(plan, SIZED), costs_of(SIZED, host_link=Link(0, 220.0)))  # 110 bytes in 0.5 s
    events = {str(event.instruction): event for event in timeline.events}
    out, back = events["OUT0.0/1"], events["IN0.0/1"]
    assert (out.resource, back.resource) == ("0→host", "host→0")
    assert out.seconds == back.seconds == pytest.approx(0.5)
    assert out.start == events["F0.0/1"].end == events["F0.0/2"].start
    assert timeline.makespan == simulate(compile_plan(replace(plan, offload=()), SIZED), costs_of(SIZED)).makespan
    assert "copies" in lanes_of(bars_of(timeline))


def test_copies_that_are_slower_than_the_computation_hold_it_up() -> None:
    compiled = compile_plan(Plan.parse("stages=6,offload=activations"), SIZED)
    fast, slow = (simulate(compiled, costs_of(SIZED, host_link=Link(0, rate))) for rate in (1000.0, 50.0))
    assert slow.makespan > fast.makespan + 4


def test_replicas_have_links_to_hosts_of_their_own() -> None:
    compiled = compile_plan(Plan.parse("dp=2,stages=6,offload=activations"), SIZED)
    timeline = simulate(compiled, costs_of(SIZED, host_link=Link(0, 1000.0)))
    assert {event.resource for event in timeline.events if event.instruction.op is Op.OUT} == {"0→host", "1→host"}
