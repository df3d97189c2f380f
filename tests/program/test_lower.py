"""Lowering: any plan on any model gives programs that pass the check, with everything where it hides or helps most."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.errors import PlanError
from phalanx.plan.plan import Plan
from phalanx.program.compile import compile_forward, compile_plan
from phalanx.program.grid import short_view
from phalanx.program.instructions import COLLECTIVES, COMPUTE, RECEIVES, SENDS, Op, Program, to_text
from phalanx.program.lower import lower
from phalanx.program.shape import ModelShape
from tests.program.random_plans import cases, simple_shape

Case = tuple[Plan, ModelShape]


def lowered(text: str, *shared: tuple[int, ...]) -> list[str]:
    plan = Plan.parse(text)
    return [to_text(program) for program in lower(plan, simple_shape(sum(plan.stages), *shared))]


def of_op(program: Program, *ops: Op) -> list[str]:
    return [str(instruction) for instruction in program if instruction.op in ops]


@given(cases())
def test_every_schedule_on_every_model_passes_the_check(case: Case) -> None:
    compile_plan(*case)


@given(cases(), st.integers(1, 9))
def test_every_evaluation_passes_the_check_and_only_moves_forward(case: Case, num_micro_batches: int) -> None:
    compiled = compile_forward(*case, num_micro_batches)
    ops = {instruction.op for program in compiled.programs for instruction in program}
    assert ops <= {Op.INPUT, Op.F, Op.SEND_F, Op.RECV_F, Op.GATHER}


@given(cases())
def test_ranks_of_a_place_differ_in_their_peers_only_which_are_in_their_own_pipeline(case: Case) -> None:
    compiled = compile_plan(*case)
    mesh = compiled.mesh
    for rank in mesh.world:
        pp_index, dp_index, tp_index = mesh.coordinates(rank)
        for it, placed in zip(compiled.program(rank), compiled.programs[pp_index], strict=True):
            assert it._replace(peer=placed.peer) == placed
            assert it.peer is None or mesh.coordinates(it.peer) == (placed.peer, dp_index, tp_index)


@given(cases())
def test_a_result_is_sent_directly_after_it_is_computed(case: Case) -> None:
    for program in lower(*case):
        for before, it in pairwise(program):
            if it.op in SENDS:
                assert (before.stage, before.micro_batch) == (it.stage, it.micro_batch)
                assert before.op in ((Op.F,) if it.op is Op.SEND_F else (Op.B, Op.BW))


@given(cases())
def test_items_are_counted_first_and_inputs_come_directly_before_their_first_use(case: Case) -> None:
    plan, shape = case
    for program in lower(plan, shape):
        assert program[0].op is Op.COUNT and sum(it.op is Op.COUNT for it in program) == 1
        assert sorted(of_op(program, Op.INPUT)) == sorted(f"I.{i}" for i in range(plan.mb))
        for position, it in enumerate(program):
            if it.op is Op.INPUT:
                first = next(other for other in program if other.op in COMPUTE and other.micro_batch == it.micro_batch)
                between = program[position + 1 : program.index(first)]
                assert first.op is Op.F and all(other.op in RECEIVES | {Op.GATHER} for other in between)


@given(cases())
def test_a_receive_is_posted_one_computation_ahead_or_two_and_not_more(case: Case) -> None:
    num_ahead = 2 if case[0].schedule == "eager-1f1b" else 1
    for program in lower(*case):
        place = {(it.op, it.stage, it.micro_batch): n for n, it in enumerate(short_view(program))}
        num_begun = 0
        for it in program:
            if it.op in COMPUTE:
                num_begun = max(num_begun, place[it.op, it.stage, it.micro_batch] + 1)
            elif it.op in RECEIVES:
                ops = (Op.F,) if it.op is Op.RECV_F else (Op.B, Op.BW)
                use = max(place.get((op, it.stage, it.micro_batch), -1) for op in ops)
                assert num_begun == max(0, use - num_ahead)


@given(cases())
def test_each_trained_bucket_is_reduced_once_per_step_or_micro_batch(case: Case) -> None:
    plan, shape = case
    for program in lower(plan, shape):
        reduced = Counter(it.block for it in program if it.op is Op.REDUCE)
        trained = {b for i in program if i.op in COMPUTE for b in shape.buckets(i.block or 0) if shape.trained[b]}
        times = plan.mb if plan.reduces == "micro-batch" else 1
        assert reduced == Counter(dict.fromkeys(trained, times) if plan.dp > 1 else {})


def test_one_rank_has_nothing_to_communicate() -> None:
    (program,) = lower(Plan(mb=2, stages=(3,)), simple_shape(3, (0, 2)))
    assert of_op(program, *(COLLECTIVES | SENDS | RECEIVES)) == ["COUNT", "NORM"]
    assert to_text(program[-2:]) == "NORM STEP"


def test_a_pipeline_is_lowered_as_stored() -> None:
    assert lowered("pp=2,mb=2,stages=2-1") == [
        "COUNT I.0 F0.0/0 F0.0/1 SF0.0>1 I.1 RB0.0<1 F0.1/0 F0.1/1 SF0.1>1 RB0.1<1 "
        "BW0.0/1 BW0.0/0 BW0.1/1 BW0.1/0 NORM STEP",
        "COUNT I.0 RF1.0<0 F1.0/2 RF1.1<0 BW1.0/2 SB1.0>0 I.1 F1.1/2 BW1.1/2 SB1.1>0 NORM STEP",
    ]


def test_what_is_recomputed_is_a_forward_again_before_each_backward() -> None:
    (program,) = lowered("recompute=yes,stages=2")
    assert program == "COUNT I.0 F0.0/0 F0.0/1 A0.0/1 BW0.0/1 A0.0/0 BW0.0/0 NORM STEP"


def test_adjacent_stages_on_one_rank_hand_over_without_a_message() -> None:
    first, last = lowered("pp=2,schedule=zb-v,stages=1-1-1-1")
    assert first == "COUNT I.0 RF3.0<1 F0.0/0 SF0.0>1 F3.0/3 B3.0/3 SB3.0>1 RB0.0<1 W3.0/3 B0.0/0 W0.0/0 NORM STEP"
    assert last == "COUNT I.0 RF1.0<0 F1.0/1 RB2.0<0 F2.0/2 SF2.0>0 B2.0/2 B1.0/1 SB1.0>0 W2.0/2 W1.0/1 NORM STEP"


def test_zero_3_gathers_one_computation_ahead() -> None:
    assert lowered("dp=2,zero=3,stages=3") == [
        "COUNT I.0 G0.0/0 G0.0/1 F0.0/0 G0.0/2 F0.0/1 F0.0/2 G0.0/1 BW0.0/2 R0.0/2 G0.0/0 BW0.0/1 R0.0/1 "
        "BW0.0/0 R0.0/0 NORM STEP"
    ]


def test_zero_3_can_gather_once_per_step() -> None:
    (program,) = lower(Plan.parse("dp=2,zero=3,gather=step,mb=2,stages=3"), simple_shape(3))
    assert of_op(program, Op.GATHER) == ["G0.0/0", "G0.0/1", "G0.0/2"]


@pytest.mark.parametrize("zero, shared", [(0, []), (1, ["P/0", "P/1"]), (2, ["P/0", "P/1"]), (3, [])])
def test_zero_1_and_2_share_what_they_updated(zero: int, shared: list[str]) -> None:
    program = lower(Plan(dp=2, zero=zero, stages=(2,)), simple_shape(2))[0]
    assert of_op(program, Op.SHARE) == shared
    assert to_text(program[len(program) - len(shared) - 2 :]) == " ".join(["NORM", "STEP", *shared])


def test_gradients_are_reduced_after_the_last_micro_batch_or_after_each() -> None:
    shape = simple_shape(1)
    per_step = lower(Plan.parse("dp=2,mb=2,zero=2,reduce=step,stages=1"), shape)[0]
    assert of_op(per_step, Op.REDUCE) == ["R0.1/0"]
    per_micro_batch = lower(Plan.parse("dp=2,mb=2,zero=2,stages=1"), shape)[0]
    assert of_op(per_micro_batch, Op.REDUCE) == ["R0.0/0", "R0.1/0"]


def test_a_shared_bucket_is_summed_between_the_ranks_that_hold_it_at_the_end() -> None:
    programs = lower(Plan.parse("pp=3,dp=2,stages=1-1-1"), simple_shape(3, (0, 2), (0, 1)))
    assert [of_op(program, Op.TIE) for program in programs] == [["T/3", "T/4"], ["T/4"], ["T/3"]]
    assert to_text(programs[0][-4:]) == "T/3 T/4 NORM STEP"


def test_a_bucket_shared_by_stages_of_one_rank_is_not_summed_with_itself() -> None:
    programs = lower(Plan.parse("pp=2,schedule=zb-v,stages=1-1-1-1"), simple_shape(4, (0, 3)))
    assert all(of_op(program, Op.TIE) == [] for program in programs)


def test_frozen_parameters_are_gathered_and_never_reduced_or_shared() -> None:
    shape = ModelShape(2, (), (True, True), (False, True))
    program = lower(Plan.parse("dp=2,zero=3,stages=2"), shape)[0]
    assert {it.block for it in program if it.op is Op.GATHER} == {0, 1}
    assert of_op(program, Op.REDUCE) == ["R0.0/1"]
    assert of_op(lower(Plan.parse("dp=2,zero=1,stages=2"), shape)[0], Op.SHARE) == ["P/1"]


def test_more_gradients_than_can_be_added_without_rounding_are_refused() -> None:
    tied = simple_shape(2, (0, 1))
    lower(Plan.parse("dp=2048,mb=2,stages=2,sums=exact"), tied)
    with pytest.raises(PlanError, match="adds up to 8,192 gradients of a parameter without rounding") as refused:
        lower(Plan.parse("dp=2048,mb=4,stages=2,sums=exact"), tied)
    assert "16,384 of them" in refused.value.message and "larger micro-batches" in refused.value.hint
    lower(Plan.parse("dp=2048,mb=4,stages=2"), tied)
