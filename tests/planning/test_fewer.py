"""Which plan fewer ranks go on with: what is quickest by all that is known, what moves least where that is as good."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.errors import PlanError
from phalanx.plan.complete import complete, usable_ranks
from phalanx.plan.plan import Plan
from phalanx.plan.shrink import shapes
from phalanx.planning.cluster import Cluster
from phalanx.planning.cost import Software
from phalanx.planning.estimate import estimate
from phalanx.planning.fewer import ALIKE, Known, candidates, in_order, moved_share, ranked
from phalanx.planning.work import Shape, transformer

MODEL = transformer("model", Shape(14, 1024, 16, 16, 4096, 32000, 1024))
COSTS = [1.0] * len(MODEL.blocks)
BATCH = 32
SLOW = "8x1 A100, network 1Gb/s"
FAST = "1x8 A100"


def known(cluster: str, software: Software | None = None) -> Known:
    return Known(MODEL, Cluster.read(cluster), software or Software(), BATCH)


def completed(text: str, world: int, slot: int | None = None) -> Plan:
    return complete(text, world=usable_ranks(text, world), batch_size=BATCH, costs=COSTS, slot=slot).plan


def first(cluster: str, plan: str, left: int) -> Plan:
    whole = completed(plan, left + 1)
    plans = candidates(whole, left, BATCH, lambda text: completed(text, left))
    return ranked(known(cluster), plans, whole, 1, lambda _: 0)[0][0]


@st.composite
def wholes(draw: st.DrawFn) -> Plan:
    """Plans of up to 24 ranks, with most of what plans may say."""
    pp, dp, tp = draw(st.sampled_from((1, 2, 3, 4))), draw(st.sampled_from((1, 2, 3, 4))), draw(st.sampled_from((1, 2)))
    fields: dict[str, Any] = {"pp": pp, "dp": dp, "tp": tp, "mb": draw(st.sampled_from((1, 2, 4, 8)))}
    more: tuple[dict[str, Any], ...] = (
        {}, {"zero": 1}, {"zero": 3}, {"schedule": "interleaved", "v": 2}, {"schedule": "zb-h1"},
        {"recompute": ("block",)}, {"slices": ((1, 1),)},
    )  # fmt: skip
    fields |= draw(st.sampled_from(more))
    try:
        return completed(Plan(**fields).full_text, pp * dp * tp)
    except PlanError:
        return completed(f"pp={pp},dp={dp},tp={tp}", pp * dp * tp)


@given(wholes(), st.data())
def test_whatever_may_be_gone_on_with_is_a_plan_for_the_ranks_that_are_left(whole: Plan, data: st.DataObject) -> None:
    left = data.draw(st.integers(1, max(1, whole.world - 1)))
    plans = candidates(whole, left, BATCH, lambda text: completed(text, left))
    for plan in plans:
        assert plan.world <= left and sum(plan.stages) == len(COSTS) and whole.tp % plan.tp == 0
        assert -(-BATCH // (plan.dp * plan.mb)) <= -(-BATCH // (whole.dp * whole.mb))
        assert completed(plan.full_text, left) == plan  # what is told to others is the same plan there
    assert len({(plan.pp, plan.tp) for plan in plans}) == len(plans)


@given(wholes(), st.sampled_from((SLOW, FAST)), st.data())
def test_the_order_is_the_same_wherever_it_is_found_and_leaves_nothing_out(
    whole: Plan, cluster: str, data: st.DataObject
) -> None:
    left = data.draw(st.integers(1, max(1, whole.world - 1)))
    own = known(cluster.replace("8", "24"))

    def order() -> list[str]:
        plans = candidates(whole, left, BATCH, lambda text: completed(text, left))
        found = ranked(own, plans, whole, whole.world - left, lambda plan: plan.zero != whole.zero)
        assert sorted(map(str, plans)) == sorted(str(plan) for plan, _ in found)
        kept = [plan.zero == whole.zero for plan, _ in found]
        assert kept == sorted(kept, reverse=True)
        for alike in (True, False):
            seconds = [seconds for plan, seconds in found if (plan.zero == whole.zero) == alike]
            assert all(later * ALIKE >= earlier for earlier, later in pairwise(seconds))
        return in_order(whole, left, [plan for plan, _ in found])

    texts = order()
    assert texts == order() and len(set(texts)) == len(texts)
    assert 0 < len(texts) <= 96


def test_a_pipeline_over_slow_links_stays_a_pipeline() -> None:
    """As replicas they would all send the gradients of the whole model."""
    assert (first(SLOW, "pp=8,mb=32", 7).dp, first(SLOW, "pp=4,mb=16", 3).dp) == (1, 1)
    assert first(FAST, "pp=8,mb=8", 7).dp > 1
    whole = completed("pp=8,mb=32", 8)
    assert in_order(whole, 7)[0].startswith("pp=1,dp=7")  # where nothing is known


def test_of_plans_that_take_as_long_the_one_comes_first_that_moves_least() -> None:
    whole = completed("dp=8", 8)
    plans = candidates(whole, 7, BATCH, lambda text: completed(text, 7))
    found = ranked(known(FAST, Software(step=1e6)), plans, whole, 1, lambda _: 0)
    shares = [moved_share(MODEL, whole, plan, 1) for plan, _ in found]
    assert found[0][0].shown.startswith("dp=7") and shares == sorted(shares) and shares[0] == 0


def test_how_much_state_moves_is_what_ranks_did_not_hold() -> None:
    two = completed("dp=2", 2)
    assert moved_share(MODEL, two, completed("pp=1", 1), 1) == 0
    pipeline = completed("pp=4,mb=4", 4)
    assert moved_share(MODEL, pipeline, completed("dp=3", 3), 1) > 2
    assert 0 < moved_share(MODEL, pipeline, completed("pp=3,mb=4", 3), 1) < 1
    split = completed("tp=2,dp=2", 4)
    assert moved_share(MODEL, split, completed("tp=2", 2), 2) == pytest.approx(0.0)
    assert moved_share(MODEL, split, completed("tp=1", 1), 3) > 0.4


def test_what_must_stay_comes_before_what_is_quick() -> None:
    whole = completed("pp=2,dp=2,mb=4", 4)
    plans = candidates(whole, 3, BATCH, lambda text: completed(text, 3))
    quick = ranked(known(SLOW), plans, whole, 1, lambda _: 0)
    last = ranked(known(SLOW), plans, whole, 1, lambda plan: plan.pp == quick[0][0].pp)
    assert last[-1][0].pp == quick[0][0].pp != last[0][0].pp


def test_texts_that_must_come_first_do() -> None:
    whole = completed("pp=2,tp=2,mb=4", 4)
    assert "tp=1" in in_order(whole, 3)[0]
    texts = in_order(whole, 3, keeps=lambda text: "tp=2" in text)
    kept = ["tp=2" in text for text in texts]
    assert kept[0] and kept == sorted(kept, reverse=True)
    assert sorted(texts) == sorted(in_order(whole, 3))


def test_ranks_that_have_a_place_each_keep_the_plan() -> None:
    whole = completed("dp=2", 2)
    assert in_order(whole, 2) == in_order(whole, 3) == [whole.full_text]


def test_numbers_of_replicas_that_do_not_divide_a_batch_of_slots_are_passed_over() -> None:
    """Most meshes of the most ranks are then none: it must be found among those of fewer."""
    whole = complete("dp=8", world=8, batch_size=BATCH, costs=COSTS, slot=1).plan
    plans = candidates(whole, 7, BATCH, lambda text: completed(text, 7, slot=1))
    assert plans and all(BATCH % plan.dp == 0 and plan.dp * plan.mb == BATCH for plan in plans)
    assert any(plan.dp == 4 for plan in plans)


def test_hundreds_of_ranks_are_judged_in_a_moment() -> None:
    """By what is counted, not by a clock: meshes that are worked out."""
    whole = complete("pp=8,tp=8,dp=8,mb=8", world=512, batch_size=512, costs=COSTS).plan
    looked = list[str]()

    def note(text: str) -> Plan:
        looked.append(text)
        return complete(text, world=usable_ranks(text, 511), batch_size=512, costs=COSTS).plan

    plans = candidates(whole, 511, 512, note)
    assert len(plans) <= 64 and len(looked) <= 700
    assert plans[0].shown.startswith("pp=8,dp=7,tp=8")  # as before, but for one replica
    assert len(shapes(whole, 511)) > 3000
    own = replace(known("64x8 A100"), batch=512)
    assert estimate(own.model, plans[0], own.cluster, own.software, 512).step_seconds > 0
