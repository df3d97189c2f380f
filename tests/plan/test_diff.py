"""The difference of two plans, as data and in words."""

from __future__ import annotations

from phalanx.plan.diff import diff, diff_text
from phalanx.plan.plan import Plan


def test_only_the_fields_that_differ_are_named() -> None:
    assert diff(Plan(mb=4), Plan(mb=8, schedule="zb-h1")) == [("mb", 4, 8), ("schedule", "1f1b", "zb-h1")]
    assert (
        diff_text(Plan(mb=4), Plan(mb=8, schedule="zb-h1")) == "mb 4 → 8, schedule 1f1b → zb-h1; the rest is the same"
    )


def test_equal_plans_are_said_to_be_the_same() -> None:
    assert diff(Plan(), Plan.parse("mb=1")) == []
    assert diff_text(Plan(), Plan.parse("mb=1")) == "the plans are the same"


def test_values_are_written_as_in_the_text_and_empty_ones_in_words() -> None:
    old = Plan(dp=4, pp=2, zero=3)
    new = Plan(dp=4, pp=2, zero=3, zero_degree=2, gather="step", reduce="step", stages=(3, 4), recompute=True)
    assert diff_text(old, new) == (
        "stages undecided → 3-4, recompute no → yes, zero_degree dp → 2, gather default → step, reduce default → step; "
        "the rest is the same"
    )


def test_when_everything_changes_nothing_is_said_to_be_the_same() -> None:
    new = (
        "pp=2,dp=4,tp=2,mb=2,schedule=zb-v,stages=1-1-1-1,zero=3,zero_degree=2,gather=step,reduce=step,"
        "degrees=1,sequence=yes,save=input,overlap=oases,replicate=yes"
    )
    old = Plan(recompute=True, slices=((1, 1),))
    object.__setattr__(old, "pairs", True)  # no two valid plans differ in every field
    assert diff_text(old, Plan.parse(new)).endswith("pairs yes → no, replicate no → yes")


def test_tensor_strategies_are_written_as_in_the_text() -> None:
    new = "tp=4,degrees=4:4*2+2:1*6,sequence=yes,save=input,overlap=oases,replicate=yes"
    assert diff_text(Plan(tp=2), Plan.parse(new)) == (
        "tp 2 → 4, degrees tp → 4:4*2+2:1*6, sequence no → yes, save default → input, overlap none → oases, "
        "replicate no → yes; the rest is the same"
    )
