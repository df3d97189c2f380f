"""Programs of plans with slices: their order, what crosses when, and what is held at once."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.plan.plan import Plan
from phalanx.plan.rules import SLICED_SCHEDULES
from phalanx.program.check import held_activations
from phalanx.program.compile import compile_forward, compile_plan
from phalanx.program.grid import place, short_view
from phalanx.program.instructions import COMPUTE, RECEIVES, SENDS, Op, Program, from_text, to_text
from phalanx.program.lower import lower, schedule_of, slices_of
from phalanx.program.passes.reductions import ADDS_TO_GRADIENTS
from phalanx.program.schedules import SCHEDULES
from phalanx.program.schedules.one_f_one_b import NUM_AHEAD, most_held
from tests.program.random_plans import cases, simple_shape
from tests.program.sliced_plans import Case, grains, sliced_cases
from tests.program.tensor_shapes import stack, tensor_cases

counts = st.lists(st.integers(1, 6), min_size=1, max_size=6)


def lowered(text: str, num_whole: int = 0) -> list[str]:
    plan = Plan.parse(text)
    shape = simple_shape(sum(plan.stages))
    return [to_text(p) for p in lower(plan, replace(shape, granularities=grains(num_whole, shape.num_blocks)))]


def most_open(program: Program) -> int:
    number, most = 0, 0
    for it in program:
        number += (it.op is Op.F) - (it.op in (Op.B, Op.BW))
        most = max(most, number)
    return most


@given(sliced_cases())
def test_every_slicing_on_every_schedule_mode_and_mesh_passes_the_check(case: Case) -> None:
    compile_plan(*case)
    compile_forward(*case, 4)


@given(sliced_cases())
def test_programs_with_slices_read_back_from_their_text(case: Case) -> None:
    for program in lower(*case):
        assert from_text(to_text(program)) == program


@given(sliced_cases())
def test_no_rank_holds_more_than_the_bound(case: Case) -> None:
    plan, shape = case
    number = [plan.num_slices(i) for i in range(plan.mb)]
    for stage, program in enumerate(compile_plan(plan, shape).programs):
        holds_all = plan.schedule in ("gpipe", "block-major")
        bound = plan.v * sum(number) if holds_all else most_held(plan.schedule, plan.pp, stage, number)
        assert held_activations(program) <= bound * plan.halves
        if not shape.num_whole_blocks:
            assert held_activations(program) == min(bound, plan.v * sum(number)) * plan.halves


@given(cases() | tensor_cases(), st.data())
def test_without_slices_grains_change_nothing_and_no_slice_is_named(case: Case, data: st.DataObject) -> None:
    plan, shape = case
    programs = lower(plan, shape)
    number = data.draw(st.integers(0, shape.num_blocks))
    assert lower(plan, replace(shape, granularities=grains(number, shape.num_blocks))) == programs
    assert all(it.slice is None for program in programs for it in program)


@given(st.integers(1, 6), counts)
def test_one_slice_to_each_micro_batch_is_the_order_without_slices(pp: int, number: list[int]) -> None:
    for name in SLICED_SCHEDULES:
        schedule = SCHEDULES[name]
        whole = schedule(pp, 1, len(number), ())
        ones = schedule(pp, 1, len(number), [1] * len(number))
        assert tuple(tuple(it._replace(slice=None) for it in order) for order in ones) == whole, name


@given(st.integers(1, 6), counts, st.sampled_from(sorted(SLICED_SCHEDULES)))
def test_slices_go_forward_in_order_and_backward_in_reverse(pp: int, number: list[int], name: str) -> None:
    for stage, order in enumerate(SCHEDULES[name](pp, 1, len(number), number)):
        forwards = [(it.micro_batch, it.slice) for it in order if it.op is Op.F]
        assert forwards == [(i, j) for i, count in enumerate(number) for j in range(count)]
        backwards = [(it.micro_batch, it.slice) for it in order if it.op in (Op.B, Op.BW)]
        micro_batches = range(len(number)) if name in NUM_AHEAD else reversed(range(len(number)))
        assert backwards == [(i, j) for i in micro_batches for j in reversed(range(number[i]))]
        held = most_held(name, pp, stage, number) if name in NUM_AHEAD else sum(number)
        assert most_open(order) == min(held, sum(number))
        if name == "zb-h1":
            assert [(it.micro_batch, it.slice) for it in order if it.op is Op.W] == backwards


@given(st.integers(1, 6), counts, st.sampled_from(sorted(SLICED_SCHEDULES)))
def test_slices_take_one_full_pass_per_further_rank(pp: int, number: list[int], name: str) -> None:
    rows = place(SCHEDULES[name](pp, 1, len(number), number))
    assert all(cell.runs for row in rows for cell in row)
    whole = 3 * sum(number) + 3 * (pp - 1)
    if name == "zb-h1":  # weight gradients fill a third of the bubble or more
        assert max(row[-1].end for row in rows) <= whole - (pp - 1)
    else:
        assert max(row[-1].end for row in rows) == whole


@given(sliced_cases())
def test_the_short_view_of_a_lowered_program_is_its_schedule_without_visits_of_nothing(case: Case) -> None:
    plan, shape = case
    for program, order in zip(lower(plan, shape), schedule_of(plan), strict=True):
        visits = [(it, plan.stage_blocks(it.stage)) for it in order if it.stage is not None]
        assert short_view(program) == tuple(it for it, blocks in visits if shape.blocks_with(it.slice, blocks))


def test_a_pipeline_of_slices_is_lowered_as_stored() -> None:
    first, last = lowered("pp=2,mb=2,slices=2-1/1,stages=1-1")
    assert first == (
        "COUNT I.0 F0.0.0/0 SF0.0.0>1 F0.0.1/0 SF0.0.1>1 I.1 RB0.0.1<1 F0.1.0/0 SF0.1.0>1 RB0.0.0<1 BW0.0.1/0 "
        "RB0.1.0<1 BW0.0.0/0 BW0.1.0/0 NORM STEP"
    )
    assert last == (
        "COUNT I.0 RF1.0.0<0 RF1.0.1<0 F1.0.0/1 F1.0.1/1 RF1.1.0<0 BW1.0.1/1 SB1.0.1>0 I.1 F1.1.0/1 BW1.0.0/1 "
        "SB1.0.0>0 BW1.1.0/1 SB1.1.0>0 NORM STEP"
    )


def test_an_encoder_runs_with_slice_0_and_hands_on_with_it() -> None:
    first, last = lowered("pp=2,slices=3,stages=1-1", num_whole=1)
    assert first == "COUNT I.0 RB0.0.0<1 F0.0.0/0 SF0.0.0>1 BW0.0.0/0 NORM STEP"
    assert last == "COUNT I.0 RF1.0.0<0 F1.0.0/1 F1.0.1/1 F1.0.2/1 BW1.0.2/1 BW1.0.1/1 BW1.0.0/1 SB1.0.0>0 NORM STEP"


def test_an_encoder_in_the_same_stage_is_first_of_the_forward_and_last_of_the_backward() -> None:
    (program,) = lowered("slices=2,stages=3", num_whole=1)
    assert program == (
        "COUNT I.0 F0.0.0/0 F0.0.0/1 F0.0.0/2 F0.0.1/1 F0.0.1/2 "
        "BW0.0.1/2 BW0.0.1/1 BW0.0.0/2 BW0.0.0/1 BW0.0.0/0 NORM STEP"
    )


def test_a_micro_batch_that_is_not_cut_has_slice_0() -> None:
    (program,) = lowered("slices=2/1,mb=2,stages=1")
    assert program == "COUNT I.0 F0.0.0/0 F0.0.1/0 BW0.0.1/0 I.1 F0.1.0/0 BW0.0.0/0 BW0.1.0/0 NORM STEP"


@given(sliced_cases())
def test_gradients_are_reduced_after_the_last_slice_of_the_step_or_micro_batch(case: Case) -> None:
    plan, shape = case
    for program in lower(plan, shape):
        reduced: Counter[tuple[int | None, int | None]] = Counter()
        for it in program:
            if it.op is Op.REDUCE:
                assert it.slice is None
                reduced[it.block, it.micro_batch if plan.reduces == "micro-batch" else None] += 1
            elif it.op in ADDS_TO_GRADIENTS and it.block is not None:
                moment = it.micro_batch if plan.reduces == "micro-batch" else None
                assert not any(reduced[bucket, moment] for bucket in shape.buckets(it.block))
        assert set(reduced.values()) <= {1}


def test_zero_3_gathers_for_each_visit_of_a_slice() -> None:
    (first,) = lowered("dp=2,zero=3,slices=2,stages=3")
    gathers = [str(it) for it in from_text(first) if it.op is Op.GATHER]
    assert gathers[:5] == ["G0.0.0/0", "G0.0.0/1", "G0.0.0/2", "G0.0.1/0", "G0.0.1/1"]


def test_halves_of_a_slice_take_turns() -> None:
    plan = Plan.parse("tp=2,overlap=halves,slices=2,stages=1")
    text = to_text(it for it in lower(plan, stack(1))[0] if it.op not in (Op.COUNT, Op.INPUT))
    assert text.startswith("F0.0.0a/0:0 F0.0.0a/0:2 CF0.0.0a/0:3 F0.0.0b/0:0 F0.0.0b/0:2 CF0.0.0b/0:3")
    assert text.index("F0.0.0b/0:8") < text.index("F0.0.1a/0:0") < text.index("BW0.0.1a/0:8") < text.index("BW0.0.0a")


@given(sliced_cases())
def test_a_message_crosses_for_each_slice_and_half_or_once_where_blocks_run_once(case: Case) -> None:
    plan, shape = case
    for program in lower(plan, shape):
        sent = Counter((it.op, it.stage, it.micro_batch) for it in program if it.op in SENDS)
        for (op, stage, i), number in sent.items():
            assert stage is not None and i is not None
            before = plan.stage_blocks(stage if op is Op.SEND_F else stage - 1)[-1]
            parts = 1 if before < shape.num_whole_blocks else plan.num_slices(i)
            assert number == parts * plan.halves


def test_blocks_that_run_once_come_before_those_that_run_per_slice() -> None:
    with pytest.raises(AssertionError, match="micro-batch blocks come before"):
        replace(simple_shape(2), granularities=("slice", "micro-batch"))


def test_slicings_are_counted_for_the_micro_batches_there_are() -> None:
    plan = Plan.parse("slices=2/5,mb=1")
    assert slices_of(plan, 1) == (2,) and slices_of(plan, 3) == (2, 5, 2) and slices_of(Plan(), 3) == ()


@given(sliced_cases())
def test_a_receive_is_posted_before_its_computation_and_each_computation_names_its_slice(case: Case) -> None:
    plan, shape = case
    for program in lower(plan, shape):
        assert all(it.slice is not None for it in program if it.op in COMPUTE | SENDS | RECEIVES)
        begun: set[tuple[bool, int | None, int | None, int | None, int | None]] = set()
        for it in program:
            if it.op in RECEIVES:
                assert (it.op is Op.RECV_F, it.stage, it.micro_batch, it.slice, it.half) not in begun
            elif it.op in (Op.F, Op.B, Op.BW):
                begun.add((it.op is Op.F, it.stage, it.micro_batch, it.slice, it.half))
