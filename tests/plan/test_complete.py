"""What is decided for a plan that leaves things open, why, and which plans do not fit the ranks, batch or model."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.errors import PlanError
from phalanx.plan.complete import Completed, balance, complete, needed_ranks
from phalanx.plan.plan import Plan

COSTS = [0.2, *[1.0] * 12, 2.5]


def completed(given: str | Plan, world: int | None = None, batch_size: int = 64) -> Completed:
    return complete(given, world=world, batch_size=batch_size, costs=COSTS)


@pytest.mark.parametrize(
    ("text", "world", "expected"),
    [
        ("", None, "stages=14"),
        ("", 1, "stages=14"),
        ("", 4, "pp=4,mb=16,stages=4-4-4-2"),
        ("dp=2", 4, "pp=2,dp=2,mb=8,stages=8-6"),
        ("pp=2", 4, "pp=2,dp=2,mb=8,stages=8-6"),
        ("pp=2", None, "pp=2,mb=8,stages=8-6"),
        ("dp=2", None, "dp=2,stages=14"),
        ("mb=3,pp=2,stages=7-7", 2, "pp=2,mb=3,stages=7-7"),
        ("schedule=gpipe", 2, "pp=2,mb=8,schedule=gpipe,stages=8-6"),
        ("zero=3", 4, "dp=4,stages=14,zero=3"),
        ("reduce=step", 4, "dp=4,stages=14,reduce=step"),
        ("zero=0", 2, "pp=2,mb=8,stages=8-6"),
        ("tp=2", None, "tp=2,stages=14"),
        ("tp=2", 2, "tp=2,stages=14"),
        ("tp=2", 8, "pp=4,tp=2,mb=16,stages=4-4-4-2"),
        ("tp=2,dp=2", 8, "pp=2,dp=2,tp=2,mb=8,stages=8-6"),
        ("tp=2,pp=2", 8, "pp=2,dp=2,tp=2,mb=8,stages=8-6"),
        ("tp=2,zero=1", 8, "dp=4,tp=2,stages=14,zero=1"),
        ("tp=2,pp=2,dp=2,overlap=oases", 8, "pp=2,dp=2,tp=2,mb=8,stages=8-6,overlap=oases"),
    ],
)
def test_what_is_left_open_is_decided(text: str, world: int | None, expected: str) -> None:
    assert completed(text, world).plan.text == expected


def test_no_more_stages_are_made_than_there_are_blocks() -> None:
    plan = complete("", world=12, batch_size=64, costs=[1.0] * 5).plan
    assert (plan.pp, plan.dp) == (4, 3)
    virtual = complete("schedule=interleaved", world=12, batch_size=64, costs=[1.0] * 5).plan
    assert (virtual.pp, virtual.dp, virtual.stages) == (2, 6, (1, 1, 1, 2))


@given(st.integers(1, 48), st.integers(48, 500), st.lists(st.floats(0.1, 10), min_size=1, max_size=20))
def test_nothing_given_suits_any_ranks_batch_and_model(world: int, batch_size: int, costs: list[float]) -> None:
    plan, _ = complete("", world=world, batch_size=batch_size, costs=costs)
    assert plan.world == world
    assert plan.stages == balance(costs, plan.num_stages)
    assert plan.dp * plan.mb <= batch_size
    assert all(world % pp or pp > len(costs) for pp in range(plan.pp + 1, world + 1))


@given(st.integers(2, 8), st.integers(1, 200))
def test_micro_batches_fill_the_pipeline_and_are_not_cut_smaller_for_nothing(pp: int, samples: int) -> None:
    mb = complete(f"pp={pp}", world=pp, batch_size=samples, costs=[1.0] * 8).plan.mb
    most = min(4 * pp, samples)
    assert 1 <= mb <= most
    largest = -(-samples // mb)
    assert largest == -(-samples // most)
    assert mb == 1 or -(-samples // (mb - 1)) > largest


def test_a_plan_object_is_taken_as_given_but_for_its_stages() -> None:
    plan, reasons = completed(Plan(pp=2), 2)
    assert plan == Plan(pp=2, mb=1, stages=(8, 6))
    assert list(reasons) == ["stages"]
    decided = Plan(pp=2, mb=4, stages=(7, 7))
    assert completed(decided, 2) == (decided, {})


def test_every_decision_has_its_reason() -> None:
    assert completed("", 2).reasons == {
        "pp": "pp 2: all ranks in one pipeline",
        "dp": "dp 1: 2 ranks / 2 in each pipeline",
        "schedule": "schedule 1f1b: no more bubble than gpipe, and holds fewer activations",
        "mb": "micro-batches 8: fills 2 stages with 11 % bubble",
        "stages": "stages 8-6: the largest costs 2 % more than the mean",
    }
    assert completed("").reasons == {
        "pp": "pp 1: no more ranks are asked for",
        "dp": "dp 1: no more ranks are asked for",
        "mb": "micro-batches 1: there is no pipeline to fill",
        "stages": "stages 14: all blocks in one stage",
    }


def test_the_reason_says_what_limited_the_decision() -> None:
    limited = complete("", world=12, batch_size=64, costs=[1.0] * 5).reasons
    assert limited["pp"] == "pp 4: the most of 12 ranks, in equal pipelines, that 5 blocks can fill"
    assert completed("dp=2", 8).reasons["pp"] == "pp 4: 8 ranks / 2 replicas"
    shared = "pp 1: zero=3 acts between replicas, so there are as many of them as the ranks allow"
    assert completed("zero=3", 4).reasons["pp"] == shared
    assert completed("reduce=step", 4).reasons["pp"].startswith("pp 1: reduce=step acts between replicas")
    assert completed("schedule=zb-v", 2).reasons["mb"] == "micro-batches 8: fills 4 stages on 2 ranks"
    even = complete("pp=2", world=2, batch_size=8, costs=[1.0] * 4).reasons
    assert even["stages"] == "stages 2-2: all cost the same"


def test_the_reason_says_what_tensor_parallelism_takes_of_the_ranks() -> None:
    reasons = completed("tp=2", 8).reasons
    assert reasons["pp"] == "pp 4: all ranks in one pipeline, 2 side by side"
    assert reasons["dp"] == "dp 1: 8 ranks / 2 tensor-parallel / 4 in each pipeline"
    assert completed("tp=2,dp=2", 8).reasons["pp"] == "pp 2: 8 ranks / 2 tensor-parallel / 2 replicas"
    limited = complete("tp=2", world=24, batch_size=64, costs=[1.0] * 5).reasons["pp"]
    assert limited == "pp 4: the most of 24 ranks / 2 tensor-parallel, in equal pipelines, that 5 blocks can fill"
    assert "tp" not in reasons


def test_a_plan_needs_as_many_ranks_as_it_says() -> None:
    assert needed_ranks("mb=4") is None
    assert [needed_ranks("tp=2"), needed_ranks("pp=2,tp=2"), needed_ranks("pp=2,dp=3,tp=2")] == [2, 4, 12]
    assert needed_ranks(Plan(tp=2)) == 2
    assert [needed_ranks("pp=2"), needed_ranks("dp=3"), needed_ranks("pp=2,dp=3"), needed_ranks("pp=1")] == [2, 3, 6, 1]
    assert needed_ranks(Plan(mb=4)) == 1
    with pytest.raises(PlanError, match="pp=0 is not a number of pipeline ranks"):
        needed_ranks("pp=0")


@pytest.mark.parametrize(
    ("text", "world", "batch_size", "message", "hint"),
    [
        ("pp=2,dp=2", 8, 8, "pp=2 × dp=2 makes 4 ranks, and there are 8", "start 4 ranks, or leave out pp, dp or both"),
        ("pp=1,dp=1", 2, 8, "pp=1 × dp=1 makes 1 rank, and there are 2", "start 1 rank, or"),
        ("pp=2,dp=1", 1, 8, "pp=2 × dp=1 makes 2 ranks, and there is 1", "start 2 ranks, or"),
        ("pp=3", 8, 8, "pp=3 does not divide the number of ranks: there are 8", "use pp=1, 2, 4 or 8, or start"),
        ("dp=2", 1, 8, "dp=2 does not divide the number of ranks: there is 1", "use dp=1, or start"),
        (
            "pp=2,dp=2,tp=2",
            4,
            8,
            "pp=2 × dp=2 × tp=2 makes 8 ranks, and there are 4",
            "start 8 ranks, or leave out one",
        ),
        ("tp=3", 8, 8, "tp=3 does not divide the number of ranks: there are 8", "use tp=1, 2, 4 or 8, or start"),
        ("tp=3,pp=2", 8, 8, "tp=3 does not divide the number of ranks: there are 8", "use tp=1, 2, 4 or 8, or start"),
        ("tp=2,pp=3", 8, 8, "pp=3 × tp=2 does not divide the number of ranks", "pp=1, 2 or 4 with tp=2, or start a"),
        ("tp=2,dp=8", 8, 8, "dp=8 × tp=2 does not divide the number of ranks", "number of ranks that 16 divides"),
        ("tp=0", 8, 8, "tp=0 is not a number of tensor-parallel ranks", "tp=1 or more"),
        ("pp=0", 8, 8, "pp=0 is not a number of pipeline ranks", "pp=1 or more"),
        ("mb=5", 1, 4, "mb=5 cuts a batch of 4 samples into more micro-batches", "use mb=4 or less"),
        ("dp=2,mb=4", 2, 7, "dp=2 × mb=4 cuts a batch of 7 samples into more parts", "use mb=3 or less"),
        ("dp=16", 16, 8, "dp=16 × mb=1 cuts a batch of 8 samples", "use dp=8 or less, or batch_size=16"),
        ("schedule=zb-v,pp=8", 8, 8, "16 stages need at least as many blocks, and the model has 14", "14 or less"),
        ("pp=2,stages=3-4", 2, 8, "stages=3-4 holds 7 blocks, and the model has 14", "add up to 14, or leave stages"),
        ("schedule=interleaved", 1, 8, "schedule=interleaved does nothing with pp=1", "pp=2 or more"),
        ("schedule=x", 2, 8, "unknown schedule 'x'", "allowed: 1f1b"),
        ("zero=1,pp=2", 2, 8, "zero=1 does nothing with dp=1", "dp=2 or more"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_numbers_and_what_to_use(
    text: str, world: int, batch_size: int, message: str, hint: str
) -> None:
    with pytest.raises(PlanError) as refused:
        completed(text, world, batch_size)
    assert message in refused.value.message
    assert hint in refused.value.hint
