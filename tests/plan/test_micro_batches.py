"""How many micro-batches are made, and which batches and evaluations a plan's groups and halves can divide."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from phalanx.errors import PlanError
from phalanx.plan.complete import bubble, complete, require_evaluation
from phalanx.plan.plan import Plan
from phalanx.plan.rules import OVERLAPS

COSTS = [1.0] * 8


def micro_batches(text: str, batch_size: int) -> int:
    return complete(text, world=None, batch_size=batch_size, costs=COSTS).plan.mb


@pytest.mark.parametrize(
    ("text", "share"),
    [
        ("pp=4,mb=8", 3 / 11),
        ("pp=4,mb=8,schedule=gpipe", 3 / 11),
        ("pp=4,mb=8,schedule=interleaved,v=2", 3 / 19),
        ("pp=4,mb=6,schedule=interleaved,v=2", None),
        ("pp=4,mb=8,schedule=zb-h1", 3 / 27),
        ("pp=4,mb=3,schedule=zb-h1", None),
        ("pp=4,mb=8,schedule=zb-v", None),
        ("mb=8", 0.0),
    ],
)
def test_the_bubble_has_a_closed_form_where_one_exists(text: str, share: float | None) -> None:
    assert bubble(Plan.parse(text)) == share


@given(
    pp=st.integers(1, 4),
    dp=st.integers(1, 3),
    degree=st.sampled_from([1, 2, 4]),
    overlap=st.sampled_from(list(OVERLAPS)),
    batch_size=st.integers(1, 200),
)
def test_what_is_decided_gives_every_micro_batch_a_sample_for_each_group_and_half(
    pp: int, dp: int, degree: int, overlap: str, batch_size: int
) -> None:
    plan = Plan(pp=pp, dp=dp, tp=4, degrees=((4, degree),), overlap=overlap)
    needed = 4 // degree * plan.halves
    given = f"pp={pp},dp={dp},tp=4,degrees=4:{degree},overlap={overlap}"
    if batch_size < dp or (needed > 1 and batch_size % (dp * needed)):
        with pytest.raises(PlanError):
            micro_batches(given, batch_size)
    else:
        mb = micro_batches(given, batch_size)
        assert needed == 1 or batch_size % (dp * mb * needed) == 0
        assert mb * dp <= batch_size


@given(st.integers(2, 6), st.integers(1, 40))
def test_of_the_numbers_that_fit_the_one_nearest_to_a_filled_pipeline_is_taken(pp: int, pairs: int) -> None:
    mb = micro_batches(f"pp={pp},tp=2,overlap=halves", 2 * pairs)
    wanted = min(4 * pp, 2 * pairs)
    ratio = max(mb, wanted) / min(mb, wanted)
    assert all(max(n, wanted) / min(n, wanted) >= ratio for n in range(1, pairs + 1) if pairs % n == 0)


def test_the_reason_says_what_the_micro_batches_had_to_be() -> None:
    reasons = complete("pp=2,tp=2,overlap=oases", world=4, batch_size=24, costs=COSTS).reasons
    assert reasons["mb"] == "micro-batches 6: fills 2 stages with 14 % bubble, each of a multiple of 2 samples"


def test_pairs_need_more_than_one_micro_batch_and_get_a_few() -> None:
    chosen = complete("tp=2,overlap=oases,pairs=yes", world=2, batch_size=24, costs=COSTS)
    assert chosen.plan.mb == 4
    assert chosen.reasons["mb"] == "micro-batches 4: each but the first has a partner"


@pytest.mark.parametrize(
    ("text", "batch_size", "message", "hint"),
    [
        (
            "tp=2,pairs=yes,mb=1", 8,
            "plan: pairs=yes does nothing with mb=1: there is no other micro-batch to take turns with",
            "use mb=2 or more, or leave pairs out",
        ),
        (
            "tp=4,degrees=2:1,overlap=oases,mb=2", 12,
            "plan: tp=4,degrees=2:1,overlap=oases (4 groups × 2 halves) needs a multiple of 8 samples in every "
            "micro-batch, and dp=1 × mb=2 cuts a batch of 12 samples into micro-batches of 6",
            "use batch_size=16",
        ),
        (
            "tp=2,overlap=halves,mb=3", 16,
            "plan: overlap=halves (2 halves) needs a multiple of 2 samples in every micro-batch, and dp=1 × mb=3 cuts "
            "a batch of 16 samples into micro-batches of 5 or 6",
            "use mb=2 or 4, or batch_size=12 or 18",
        ),
        (
            "tp=2,degrees=1,dp=2,mb=8", 16,
            "plan: tp=2,degrees=1 (2 groups) needs a multiple of 2 samples in every micro-batch, and dp=2 × mb=8 cuts "
            "a batch of 16 samples into micro-batches of 1",
            "use mb=4, or batch_size=32",
        ),
        (
            "tp=2,degrees=1", 7,
            "plan: tp=2,degrees=1 (2 groups) needs a multiple of 2 samples in every micro-batch, and dp=1 × mb=1 cuts "
            "a batch of 7 samples into micro-batches of 7",
            "use batch_size=6 or 8",
        ),
    ],
)  # fmt: skip
def test_a_batch_that_groups_and_halves_cannot_divide_is_refused_with_the_numbers_that_fit(
    text: str, batch_size: int, message: str, hint: str
) -> None:
    with pytest.raises(PlanError) as refused:
        micro_batches(text, batch_size)
    assert (refused.value.message, refused.value.hint) == (message, hint)


@given(st.integers(1, 64), st.integers(1, 4), st.integers(1, 8))
def test_the_numbers_that_a_refusal_names_fit(batch_size: int, dp: int, mb: int) -> None:
    assume(dp * mb <= batch_size)
    given = f"tp=4,degrees=2,dp={dp},overlap=halves"
    try:
        micro_batches(f"{given},mb={mb}", batch_size)
    except PlanError as refused:
        for choice in refused.hint.removeprefix("use ").split(", or "):
            name, _, numbers = choice.partition("=")
            for number in map(int, numbers.split(" or ")):
                if name == "mb":
                    assert micro_batches(f"{given},mb={number}", batch_size) == number
                else:
                    assert name == "batch_size" and micro_batches(f"{given},mb={mb}", number) == mb
    else:
        assert batch_size % (dp * mb * 4) == 0


def test_without_groups_and_halves_micro_batches_may_be_uneven() -> None:
    assert micro_batches("tp=2,mb=3", 16) == 3
    require_evaluation(Plan(tp=2), 7)


def test_an_evaluation_that_groups_and_halves_cannot_divide_is_refused() -> None:
    plan = Plan(tp=2, degrees=((1,),), overlap="oases")
    require_evaluation(plan, 8)
    with pytest.raises(PlanError) as refused:
        require_evaluation(plan, 10)
    assert refused.value.message == (
        "plan: tp=2,degrees=1,overlap=oases (2 groups × 2 halves) needs a multiple of 4 samples in every micro-batch, "
        "and an evaluation of 10 samples leaves 2 over"
    )
    assert refused.value.hint == "use eval_samples=8"
    with pytest.raises(PlanError, match="evaluate on 4 samples or more"):
        require_evaluation(plan, 3)
