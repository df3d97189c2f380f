"""The plan as text and as JSON, and what is said about a wrong one."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.errors import PlanError
from phalanx.plan.plan import AXES, SCHEDULES, Plan

plans = st.builds(Plan, mb=st.integers(1, 10**6), schedule=st.sampled_from(SCHEDULES), recompute=st.booleans())


@given(plans)
def test_text_and_json_read_back(plan: Plan) -> None:
    assert Plan.parse(plan.text) == plan
    assert Plan.from_json(plan.to_json()) == plan


@given(plans, plans)
def test_texts_are_equal_exactly_when_plans_are(one: Plan, other: Plan) -> None:
    assert (one.text == other.text) == (one == other)


def test_the_text_says_only_what_differs_from_the_defaults() -> None:
    assert Plan().text == ""
    assert Plan(mb=4, schedule="gpipe", recompute=True).text == "mb=4,schedule=gpipe,recompute=yes"


def test_spaces_order_and_axes_of_one_do_not_matter() -> None:
    assert Plan.parse(" schedule=gpipe, mb=2 ,pp=1,tp=1,dp=1,") == Plan(mb=2, schedule="gpipe")


def test_a_plan_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Plan().mb = 2  # pyright: ignore[reportAttributeAccessIssue]


WRONG = {
    "mb": ("'mb' is not name=value", "mb=4,schedule=gpipe"),
    "mb=0": ("mb=0 is not a number of micro-batches", "mb=1 or more"),
    "mb=-1": ("mb='-1' is not a whole number", "mb=1 or more"),
    "mb=2.5": ("mb='2.5' is not a whole number", "mb=1 or more"),
    "mb=²": ("mb='²' is not a whole number", "mb=1 or more"),
    "mb=": ("mb='' is not a whole number", "mb=1 or more"),
    "mb=2,mb=4": ("'mb' is given twice", "each field once"),
    "schedule=1f1": ("unknown schedule '1f1'", "did you mean '1f1b'"),
    "schedule=x": ("unknown schedule 'x'", "allowed: 1f1b, gpipe, zb-h1"),
    "recompute=true": ("recompute='true' is neither yes nor no", "recompute=yes or recompute=no"),
    "recomptue=yes": ("unknown field 'recomptue'", "did you mean 'recompute'"),
    "microbatches=4": ("unknown field 'microbatches'", "allowed: dp, mb, pp, recompute, schedule, tp"),
    **{f"{axis}=2": (f"{axis}=2 needs several ranks", f"use {axis}=1") for axis in AXES},
}


@pytest.mark.parametrize("text", WRONG)
def test_a_wrong_text_is_refused_with_the_word_and_what_may_stand_there(text: str) -> None:
    message, hint = WRONG[text]
    with pytest.raises(PlanError) as refused:
        Plan.parse(text)
    assert message in refused.value.message
    assert hint in refused.value.hint


WRONG_JSON = {
    "{mb": ("not JSON", '"mb": 1'),
    "[4]": ("not a JSON object", '"mb": 1'),
    '{"mbs": 4}': ("unknown field 'mbs'", "did you mean 'mb'"),
    '{"mb": "4"}': ("mb='4' has the wrong type", "for example 1"),
    '{"mb": true}': ("mb=True has the wrong type", "for example 1"),
    '{"recompute": "no"}': ("recompute='no' has the wrong type", "for example False"),
    '{"mb": 0}': ("mb=0 is not a number of micro-batches", "mb=1 or more"),
    '{"schedule": "gpip"}': ("unknown schedule 'gpip'", "did you mean 'gpipe'"),
}


@pytest.mark.parametrize("text", WRONG_JSON)
def test_wrong_json_is_refused_with_the_field_and_what_may_stand_there(text: str) -> None:
    message, hint = WRONG_JSON[text]
    with pytest.raises(PlanError) as refused:
        Plan.from_json(text)
    assert message in refused.value.message
    assert hint in refused.value.hint
