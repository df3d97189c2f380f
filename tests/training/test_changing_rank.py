"""Which plans a rank tries between two steps while others are missing, and what the plan of all ranks is afterwards."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from phalanx.config import RunConfig
from phalanx.errors import PlanError
from phalanx.launch.context import RankContext
from phalanx.observe.requests import Request
from phalanx.plan.complete import complete, usable_ranks
from phalanx.plan.periods import Period
from phalanx.plan.plan import Plan
from phalanx.training.changing import ASKED, SCHEDULED, Changes, Wanted
from phalanx.training.changing_rank import ChangingRank
from phalanx.training.standby import Standby


def plan_of(period: Period, text: str, world: int, slot: int | None = None) -> Plan:
    usable = usable_ranks(text, world)
    return complete(text, world=usable, batch_size=period.batch_size, costs=[1.0] * 8, slot=slot).plan


def rank(whole: str, world: int, batch_size: int, slot: int | None = None, left: int = 0) -> ChangingRank:
    """whole: the plan of all ranks, for a batch of so many samples; left: how many there are now."""
    own: Any = ChangingRank.__new__(ChangingRank)
    own.completed = lambda period, text, world: plan_of(period, text, world, slot)
    whole_plan = plan_of(Period(1, 0, whole, batch_size, None), whole, world, slot)
    own.changes = type("Changes", (), {"whole": whole_plan.full_text})
    own.context = SimpleNamespace(world=left)
    own.standby = Standby(cast(Any, SimpleNamespace(config=SimpleNamespace(deterministic=slot is not None))))
    return own


@pytest.mark.parametrize(
    ("whole", "slot", "named", "text", "expected"),
    [
        ("dp=3", None, "dp=3", "dp=2,mb=2", "dp=3"),  # carried on by fewer
        ("pp=2,dp=2,mb=3,zero=1", None, "", "dp=3,mb=4", "pp=2,dp=2,mb=3,zero=1"),
        ("dp=3", 1, "dp=3", "dp=2,mb=6", "dp=3,mb=4"),  # as many micro-batches as it must have for the new batch
        ("dp=3", None, "zero=1", "zero=1", "dp=3,zero=1"),  # what the options name for all ranks that there are
        ("dp=3", None, "dp=2,zero=1", "dp=2,zero=1", "dp=2,zero=1"),  # or for some of them
    ],
)
def test_the_plan_of_all_ranks_outlives_a_change_of_batches_that_fewer_make(
    whole: str, slot: int | None, named: str, text: str, expected: str
) -> None:
    world = Plan.parse(whole).world
    own, period = rank(whole, world, 6, slot, left=world - 1), Period(6, 30, named, 12, None)
    assert own._of_all(Wanted(period, (text,), SCHEDULED, True)) == plan_of(period, expected, world, slot)


def test_only_while_ranks_are_missing_is_there_another_plan_of_all_ranks_and_none_of_what_is_asked_for() -> None:
    period = Period(1, 0, "dp=3", 6, None)
    asked = Wanted(period, ("dp=2",), ASKED, request=Request("a", "dp=2"))
    assert rank("dp=3", 3, 6, left=2)._of_all(asked) is None
    assert rank("dp=3", 3, 6, left=3)._of_all(Wanted(period, ("dp=2",), SCHEDULED, True)) is None


@pytest.mark.parametrize(
    ("named", "now", "of_all"),
    [
        ("dp=3,zero=1", "dp=2,zero=1,mb=2", "dp=3,zero=1"),  # as it would be after a loss of ranks that have it
        ("pp=3,mb=2", "dp=2", "pp=3,mb=2"),
        ("dp=2,zero=1", "dp=2,zero=1", "dp=2,zero=1"),  # which those that are left can make
    ],
)
def test_a_plan_that_the_options_name_for_ranks_that_are_missing_is_carried_on_by_fewer(
    named: str, now: str, of_all: str, tmp_path: Path
) -> None:
    config = RunConfig(plan="dp=3", batch_size=12, plan_at=(f"6:{named}",), steps=9)
    changes, own = Changes(config, RankContext.alone("cpu"), tmp_path, 1), rank("dp=3", 3, 12, left=2)
    (wanted,) = changes.at(6, cast(Any, None), False)
    assert first_that_can_be(own, wanted, 2) == plan_of(wanted.period, now, 2)
    assert own._of_all(wanted) == plan_of(wanted.period, of_all, 3)


def first_that_can_be(own: ChangingRank, wanted: Wanted, world: int) -> Plan:
    for text in own._tried(wanted):
        with contextlib.suppress(PlanError):
            return own.completed(wanted.period, text, world)
    raise AssertionError("there was none")


@pytest.mark.parametrize(
    ("whole", "batches", "slot", "kept", "expected"),
    [
        ("dp=4", (12, 24), 1, "dp=3,mb=4", "dp=3,mb=8"),  # what is computed together stays so
        ("dp=4,mb=2", (24, 6), None, "dp=3,mb=3", "dp=3"),  # fewer samples than micro-batches
        ("pp=2,dp=2,mb=2", (16, 2), None, "dp=3,mb=2", "pp=3"),  # and than replicas
        ("dp=2,tp=2,degrees=1", (8, 3), None, "pp=3,mb=2", "pp=3,mb=2"),  # what fits is kept
    ],
)
def test_a_run_that_lost_ranks_goes_on_with_other_batches(
    whole: str, batches: tuple[int, int], slot: int | None, kept: str, expected: str, tmp_path: Path
) -> None:
    config = RunConfig(plan=whole, batch_size=batches[0], batch_size_at=(f"6:{batches[1]}",), steps=9)
    world = Plan.parse(kept).world
    own = rank(whole, 4, batches[0], slot, left=world)
    changes = Changes(config, RankContext.alone("cpu"), tmp_path, 1)
    changes.plan = own.completed(changes.period, kept, world).full_text
    (wanted,) = changes.at(6, cast(Any, None), False)
    assert first_that_can_be(own, wanted, world) == plan_of(wanted.period, expected, Plan.parse(expected).world, slot)


def test_micro_batches_that_the_options_name_are_kept_or_refused(tmp_path: Path) -> None:
    config = RunConfig(plan="dp=2,mb=4", batch_size=8, batch_size_at=("6:4",), steps=9)
    changes = Changes(config, RankContext.alone("cpu"), tmp_path, 1)
    (wanted,) = changes.at(6, cast(Any, None), False)
    assert (wanted.plans, wanted.must) == (("dp=2,mb=4",), True)
