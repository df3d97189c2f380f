"""Every walk of the formation matrix (`walks.py`) enters and leaves every value of every field that its model takes."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest

from phalanx.plan.plan import Plan
from tests.adapt import covering, walks
from tests.adapt.walks import KINDS, Kind


def plans(kind: Kind) -> list[list[Plan]]:
    wide = [walks.planned(text, kind, walks.WIDE_RANKS) for text in walks.wide()]
    return [[walks.planned(text, kind) for text in walks.walk(kind)], wide]


def test_every_field_of_a_plan_is_known_to_the_walks() -> None:
    assert covering.unknown_fields(covering.plan_fields()) == []


@pytest.mark.parametrize("name", KINDS)
def test_every_value_of_every_field_comes_and_goes(name: str) -> None:
    assert covering.missing(plans(KINDS[name]), KINDS[name].cannot) == []


@pytest.mark.parametrize("name", KINDS)
def test_every_value_that_leaves_the_bits_comes_and_goes_in_a_deterministic_run(name: str) -> None:
    kept = [walks.planned(text, KINDS[name]) for text in walks.same_bits(walks.walk(KINDS[name]))]
    assert covering.missing([kept], (*walks.CHANGES_BITS, *walks.SLOTS_DECIDE)) == []


NAMED: dict[str, Callable[[Plan, Plan], bool]] = {
    "four stages become three": lambda old, new: (old.pp, new.pp) == (4, 3),
    "three stages become four": lambda old, new: (old.pp, new.pp) == (3, 4),
    "tensor parallelism becomes replicas": lambda old, new: (old.tp, new.dp) == (old.world, new.world) and old.tp > 1,
    "replicas become tensor parallelism": lambda old, new: (old.dp, new.tp) == (old.world, new.world) and old.dp > 1,
    "stages move alone": lambda old, new: (
        old.stages != new.stages and dict(vars(old), stages=()) == dict(vars(new), stages=())
    ),
    "virtual stages grow alone": lambda old, new: old.schedule == new.schedule and old.v < new.v,
    "ranks lose their place": lambda old, new: new.world < old.world,
    "ranks get one": lambda old, new: new.world > old.world,
    "one process alone": lambda old, new: old.world > new.world == 1,
    "state is sharded once more": lambda old, new: 0 < old.zero < new.zero,
}


@pytest.mark.parametrize("change", NAMED)
def test_changes_that_have_a_name_are_on_every_walk(change: str) -> None:
    for kind in KINDS.values():
        assert any(NAMED[change](old, new) for old, new in pairwise(plans(kind)[0])), kind.name


def test_what_is_new_in_the_product_is_missing_on_every_walk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A field and a word that no walk has yet, and a walk without a way back."""
    (told,) = covering.unknown_fields([*covering.plan_fields(), "warp"])
    assert told.startswith("Plan has a field 'warp' that no walk knows: say in tests/adapt/covering.py what")
    schedules = covering.WORDS["schedule"]
    grown = {**covering.WORDS, "schedule": schedules._replace(known=[*schedules.known, "spiral"])}
    monkeypatch.setattr(covering, "WORDS", grown)
    (sentence,) = covering.missing(plans(KINDS["Llama"]))
    assert sentence.startswith("no change enters schedule: spiral; add a plan with it to tests/adapt/walks.py, or,")
    told = covering.missing([plans(KINDS["Llama"])[0][:2]])
    assert "no change makes dp larger: add one to tests/adapt/walks.py" in told
    assert "no change leaves schedule: gpipe; add a plan without it after that in tests/adapt/walks.py" in told


def test_random_walks_differ_and_reach_what_the_written_ones_have() -> None:
    first, second = ([walks.planned(text, KINDS["GPT-2"]) for text in texts] for texts in random_texts(1, 2))
    assert first != second and len(set(first)) > 15
    assert len({plan.schedule for plan in first}) > 3 and len({plan.world for plan in first}) > 1


def random_texts(*seeds: int) -> list[list[str]]:
    return [walks.random_walk(KINDS["GPT-2"], seed, 20) for seed in seeds]
