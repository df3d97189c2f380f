"""What a plan says about slices: slicings as text, where tokens are cut, what is refused."""

from __future__ import annotations

from fractions import Fraction
from itertools import accumulate, pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.errors import PlanError
from phalanx.plan.complete import Completed, complete
from phalanx.plan.fields import Slicings, bounds, read_slicings, take_slicings, write_slicings
from phalanx.plan.plan import Plan

lengths = st.lists(st.integers(1, 4096), min_size=1, max_size=9)
slicings = st.lists(lengths | st.integers(1, 20).map(lambda n: [1] * n), min_size=1, max_size=4).map(take_slicings)


@given(slicings)
def test_slicings_read_back_from_their_text_and_from_lists(value: Slicings) -> None:
    assert read_slicings("slices", write_slicings(value)) == value
    assert take_slicings([list(slicing) for slicing in value]) == value


@given(slicings.filter(lambda value: max(map(len, value)) > 1))
def test_a_plan_with_slices_reads_back_from_its_text_and_from_json(value: Slicings) -> None:
    plan = Plan(slices=value)
    assert Plan.parse(plan.text) == Plan.from_json(plan.to_json()) == plan


def test_slices_are_written_as_lengths_or_as_the_number_of_equal_ones() -> None:
    plan = Plan.parse("pp=2,slices=512-512-1024/4")
    assert plan.slices == ((512, 512, 1024), (1, 1, 1, 1))
    assert plan.text == "pp=2,slices=512-512-1024/4"
    assert Plan.parse("slices=512-512").text == Plan(slices=((7, 7),)).text == "slices=2"


def test_slicings_take_turns_over_the_micro_batches() -> None:
    plan = Plan.parse("slices=3-2-1/2/1,mb=5")
    assert [plan.num_slices(i) for i in range(5)] == [3, 2, 1, 3, 2]
    assert [plan.slice_bounds(i, 12) for i in range(3)] == [(0, 6, 10, 12), (0, 6, 12), (0, 12)]


def test_without_slices_a_micro_batch_is_one() -> None:
    assert Plan().num_slices(7) == 1 and Plan().slice_bounds(7, 100) == (0, 100)


def test_lengths_that_add_up_are_taken_exactly_and_halves_of_a_token_are_rounded_down() -> None:
    assert bounds((512, 520, 1016), 2048) == (0, 512, 1032, 2048)
    assert bounds((1, 1), 5) == (0, 2, 5)
    assert bounds((1000, 1, 1), 3) == (0, 1, 2, 3)
    assert bounds((1, 1, 1000), 4) == (0, 1, 2, 4)


@given(lengths)
def test_any_lengths_that_add_up_are_taken_exactly(slicing: list[int]) -> None:
    assert bounds(slicing, sum(slicing)) == (0, *accumulate(slicing))


@given(lengths, st.integers(9, 10_000), st.integers(1, 50))
def test_every_slice_has_a_token_and_is_as_near_to_its_share_as_that_allows(
    slicing: list[int], tokens: int, scale: int
) -> None:
    edges = bounds(slicing, tokens)
    assert edges == bounds([length * scale for length in slicing], tokens)
    assert (edges[0], edges[-1], len(edges)) == (0, tokens, len(slicing) + 1)
    assert all(end > begin for begin, end in pairwise(edges))
    exact = [Fraction(tokens * end, sum(slicing)) for end in (0, *accumulate(slicing))]
    if all(end - begin >= 2 for begin, end in pairwise(exact)):
        assert all(abs(edge - wanted) <= Fraction(1, 2) for edge, wanted in zip(edges, exact))


def test_fewer_tokens_than_slices_are_refused_with_both_numbers() -> None:
    with pytest.raises(PlanError) as refused:
        Plan.parse("slices=2/3-2-1").slice_bounds(1, 2)
    assert refused.value.message == "plan: slices=3-2-1 cuts 2 tokens into 3 slices"
    assert refused.value.hint == "use 2 slices or fewer, or longer sequences"


FORM = (
    "write the number of equal slices, or lengths joined by '-'; different slicings joined by '/': "
    "slices=4, slices=512-512-1024/3-1"
)
LENGTHS = "give every slice a length of 1 or more"
WHOLE = "use slices=2 or more, or leave slices out"
ORDER = "it orders whole micro-batches, and slices go forward in order and backward in reverse"
OTHERS = "use schedule=1f1b, eager-1f1b, gpipe, zb-h1 or block-major, or leave slices out"

WRONG = {
    "slices=": ("plan: slices='' is not a slicing", FORM),
    "slices=x": ("plan: slices='x' is not a slicing", FORM),
    "slices=2/3-": ("plan: slices='2/3-': '3-' is not a slicing", FORM),
    "slices=2//3": ("plan: slices='2//3': '' is not a slicing", FORM),
    "slices=99999": ("plan: slices='99999' is not a slicing", FORM),
    "slices=²": ("plan: slices='²' is not a slicing", FORM),
    "slices=3-0-1": ("plan: slices=3-0-1 has a slice without tokens, slice 1", LENGTHS),
    "slices=0": ("plan: slices=0 has a slice without tokens", LENGTHS),
    "slices=1": ("plan: slices=1 does nothing: micro-batches of one slice are whole", WHOLE),
    "slices=1/1": ("plan: slices=1/1 does nothing: micro-batches of one slice are whole", WHOLE),
    "slices=4,schedule=zb-v": (f"plan: slices=4 cannot be ordered by schedule=zb-v: {ORDER}", OTHERS),
    "pp=2,slices=2-1,schedule=interleaved": (
        f"plan: slices=2-1 cannot be ordered by schedule=interleaved: {ORDER}", OTHERS,
    ),
}  # fmt: skip


@pytest.mark.parametrize("text", WRONG)
def test_a_wrong_text_is_refused_with_the_reason_and_what_may_stand_there(text: str) -> None:
    with pytest.raises(PlanError) as refused:
        Plan.parse(text)
    assert (refused.value.message, refused.value.hint) == WRONG[text]


@pytest.mark.parametrize("value", [4, [4], [["4"]], [[True, True]], [[1.0, 2]], "4"])
def test_slices_of_a_wrong_type_are_refused_with_an_example(value: Any) -> None:
    with pytest.raises(PlanError, match="has the wrong type") as refused:
        Plan(slices=value)
    assert refused.value.hint == "write for example [[512, 512, 1024], [1, 1]]"


def completed(text: str) -> Completed:
    return complete(text, world=None, batch_size=8, costs=[1.0] * 4)


def test_slices_are_kept_when_a_plan_is_completed_and_never_decided() -> None:
    assert completed("pp=2,slices=3-1").plan.text == "pp=2,mb=8,slices=3-1,stages=2-2"
    assert completed("pp=2,slices=3-1").reasons["mb"] == "micro-batches 8: fills 2 stages on 2 ranks"
    assert completed("pp=2").plan.slices == ()


def test_a_slicing_whose_turn_never_comes_is_refused() -> None:
    with pytest.raises(PlanError) as refused:
        completed("mb=2,slices=4/2/3-1")
    assert refused.value.message == "plan: slices=4/2/3-1 gives 3 slicings, and mb=2 never comes to slices=3-1"
    assert refused.value.hint == "use mb=3 or more, or fewer slicings"
    assert completed("mb=3,slices=4/2/3-1").plan.mb == 3
