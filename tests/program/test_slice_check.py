"""Wrong programs with slices are told: what is out of order, missing, or more than the schedule promises."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from phalanx.errors import PlanError
from phalanx.plan.plan import Plan
from phalanx.program.check import check
from phalanx.program.instructions import Op, from_text, to_text
from phalanx.program.lower import lower
from tests.program.random_plans import simple_shape
from tests.program.sliced_plans import Case, grains, sliced_cases

quick = settings(max_examples=25, deadline=None)

Mutation = Callable[[str], str]


def drop(word: str) -> Mutation:
    return lambda text: " ".join(other for other in text.split() if other != word)


def replaced(old: str, new: str) -> Mutation:
    return lambda text: " ".join(new if word == old else word for word in text.split())


def swap(one: str, other: str) -> Mutation:
    turned = {one: other, other: one}
    return lambda text: " ".join(turned.get(word, word) for word in text.split())


@pytest.mark.parametrize("plan, num_whole, rank, mutation, words", [
    ("slices=2,stages=1", 0, 0, swap("F0.0.0/0", "F0.0.1/0"), "rank 0 runs F0.0.1/0 before F0.0.0/0"),
    ("slices=2,stages=1", 0, 0, swap("BW0.0.0/0", "BW0.0.1/0"), "rank 0 runs BW0.0.0/0 before B0.0.1/0"),
    ("slices=2,stages=1", 0, 0, replaced("F0.0.1/0", "F0.0.2/0"), "but micro-batch 0 has the slices 0 to 1"),
    ("slices=2,stages=1", 0, 0, replaced("F0.0.1/0", "F0.0/0"), "but micro-batch 0 has the slices 0 to 1"),
    ("slices=2,stages=1", 0, 0, drop("F0.0.1/0"), "rank 0 runs BW0.0.1/0 before F0.0.1/0"),
    ("slices=2,stages=1", 0, 0, drop("BW0.0.0/0"), "rank 0 has NORM before micro-batch 0 has added all its gradients"),
    ("stages=1", 0, 0, replaced("F0.0/0", "F0.0.0/0"), "but micro-batch 0 is not cut into slices under this plan"),
    ("slices=2,stages=2", 1, 0, replaced("F0.0.1/1", "F0.0.1/0 F0.0.1/1"), "block 0 runs once per micro-batch, with"),
    ("slices=2,stages=2", 1, 0, swap("BW0.0.0/1", "BW0.0.0/0"), "rank 0 runs BW0.0.0/0 before B0.0.0/1"),
    ("pp=2,slices=2,stages=1-1", 0, 1, drop("RF1.0.1<0"), "rank 1 runs F1.0.1/1 before RF1.0.1<0 is posted"),
    ("pp=2,slices=2,stages=1-1", 0, 0, drop("SF0.0.1>1"), "rank 1 waits for RF1.0.1<0, which rank 0 never sends"),
    ("pp=2,slices=2,stages=1-1", 0, 1, swap("RF1.0.0<0", "RF1.0.1<0"), "the order must be the same at both ends"),
    ("pp=2,slices=2,stages=1-1", 1, 1, replaced("F1.0.1/1", "RF1.0.1<0 F1.0.1/1"), "belongs to the micro-batch and g"),
    ("pp=2,slices=2,stages=1-1", 1, 1, drop("SB1.0.0>0"), "rank 0 waits for RB0.0.0<1, which rank 1 never sends"),
])  # fmt: skip
def test_a_wrong_program_is_refused_in_words(
    plan: str, num_whole: int, rank: int, mutation: Mutation, words: str
) -> None:
    parsed = Plan.parse(plan)
    plain = simple_shape(sum(parsed.stages))
    shape = replace(plain, grains=grains(num_whole, plain.num_blocks))
    programs = list(lower(parsed, shape))
    programs[rank] = from_text(mutation(to_text(programs[rank])))
    with pytest.raises(PlanError) as refused:
        check(parsed, shape, programs)
    assert words in str(refused.value) and str(refused.value).count("<-- here") == 1


def test_more_forwards_at_once_than_1f1b_promises_are_refused() -> None:
    plan, shape = Plan.parse("pp=2,mb=3,slices=2,stages=1-1"), simple_shape(2)
    eager = replace(plan, schedule="gpipe")
    programs = lower(eager, shape)
    assert check(eager, shape, programs)[0].activations == 6
    with pytest.raises(PlanError, match=r"rank 0 has 6 forwards at once .* where schedule=1f1b promises 3 at most"):
        check(plan, shape, programs)


@quick
@given(sliced_cases(), st.data())
def test_no_instruction_can_be_left_out(case: Case, data: st.DataObject) -> None:
    plan, shape = case
    programs = list(lower(plan, shape))
    rank = data.draw(st.integers(0, plan.world - 1))
    position = data.draw(st.integers(0, len(programs[rank]) - 1))
    programs[rank] = programs[rank][:position] + programs[rank][position + 1 :]
    with pytest.raises(PlanError, match="<-- here"):
        check(plan, shape, programs)


@quick
@given(sliced_cases(), st.data())
def test_a_slice_cannot_run_before_the_one_it_needs(case: Case, data: st.DataObject) -> None:
    plan, shape = case
    programs = list(lower(plan, shape))
    program = list(programs[0])
    later = [it for it in program if it.slice and it.op is Op.F]
    assume(later)
    it = data.draw(st.sampled_from(later))
    program.remove(it)
    program.insert(program.index(replace(it, slice=it.slice - 1 if it.slice else None)), it)
    programs[0] = tuple(program)
    with pytest.raises(PlanError, match="<-- here"):
        check(plan, shape, programs)
