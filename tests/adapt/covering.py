"""What a walk from plan to plan leaves out: values of fields that it does not enter or does not leave, in sentences.

Which fields there are and what may stand in them is asked of the product: what is new there is missing on every walk.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from itertools import pairwise
from typing import NamedTuple

from phalanx.errors import PlanError
from phalanx.plan import offload
from phalanx.plan.fields import POLICIES
from phalanx.plan.plan import OVERLAPS, SCHEDULES, Plan
from phalanx.plan.rules import MOMENTS, SAVES, SUMS

NUMBERS = ("pp", "dp", "tp", "mb", "v", "zero")  # a walk makes each larger, and smaller


class Words(NamedTuple):
    """What can be said of a field, and what a plan says of it."""

    known: Sequence[str]
    said: Callable[[Plan], Iterable[str]]


def _slices(plan: Plan) -> Iterator[str]:
    yield from ("equal" if len(set(lengths)) == 1 else "of other lengths" for lengths in plan.slices)
    yield from ["in turn"] * (len(plan.slices) > 1)


def _degrees(plan: Plan) -> Iterator[str]:
    yield from ("one number" if len(units) == 1 else "by unit" for units in plan.degrees)
    yield from ["by layer"] * (len(plan.degrees) > 1)


def _recompute(plan: Plan) -> Iterator[str]:
    yield from plan.policies
    yield from ["by layer"] * (len(plan.policies) > 1)


def _offload(plan: Plan) -> Iterator[str]:
    for word, amount in plan.offload:
        yield word if (word, amount) in offload.read_offload("offload", word) else f"{word}, a part"


def _zero_levels() -> Iterator[str]:
    for level in range(10):
        try:
            yield str(Plan(dp=2, zero=level).zero)
        except PlanError:
            return


def _yes(name: str) -> Words:
    return Words(["yes"], lambda plan: ["yes"] * getattr(plan, name))


WORDS: Mapping[str, Words] = {
    "slices": Words(["equal", "of other lengths", "in turn"], _slices),
    "schedule": Words(SCHEDULES, lambda plan: [plan.schedule]),
    "stages": Words(["uneven"], lambda plan: ["uneven"] * (max(plan.stages) > 1 + min(plan.stages))),
    "recompute": Words([*POLICIES, "by layer"], _recompute),
    "zero": Words(list(_zero_levels()), lambda plan: [str(plan.zero)]),
    "zero_degree": Words(
        ["all ranks", "some ranks"],
        lambda plan: ["all ranks" if plan.shards == plan.dp else "some ranks"] * (plan.zero > 0),
    ),
    "gather": Words(MOMENTS, lambda plan: [plan.gathers]),
    "reduce": Words(MOMENTS, lambda plan: [plan.reduces] * (plan.dp > 1)),
    "degrees": Words(["one number", "by unit", "by layer"], _degrees),
    "sequence": _yes("sequence"),
    "save": Words(SAVES, lambda plan: [plan.saves]),
    "overlap": Words(list(OVERLAPS), lambda plan: [plan.overlap]),
    "pairs": _yes("pairs"),
    "replicate": _yes("replicate"),
    "offload": Words([f"{word}{part}" for word in offload.WORDS for part in ("", ", a part")], _offload),
    "sums": Words(SUMS, lambda plan: [plan.sums]),
}


def unknown_fields(names: Iterable[str]) -> list[str]:
    return [
        f"Plan has a field '{name}' that no walk knows: say in tests/adapt/covering.py what can be said of it, and add "
        "plans that enter and leave every value of it to tests/adapt/walks.py"
        for name in names
        if name not in NUMBERS and name not in WORDS
    ]


def plan_fields() -> list[str]:
    return [each.name for each in fields(Plan)]


def missing(walks: Sequence[Sequence[Plan]], without: Collection[str] = ()) -> list[str]:
    """Of some walks together; but for some fields. Empty: every value of every other field comes and goes."""
    steps = [pair for walk in walks for pair in pairwise(walk)]
    found = [sentence for name in NUMBERS if name not in without for sentence in _one_way(name, steps)]
    return found + [sentence for name in WORDS if name not in without for sentence in _left_out(name, steps)]


def _one_way(name: str, steps: Sequence[tuple[Plan, Plan]]) -> Iterator[str]:
    differences = {getattr(new, name) - getattr(old, name) for old, new in steps}
    for direction, there in (("larger", max(differences) > 0), ("smaller", min(differences) < 0)):
        if not there:
            yield f"no change makes {name} {direction}: add one to tests/adapt/walks.py"


def _left_out(name: str, steps: Sequence[tuple[Plan, Plan]]) -> Iterator[str]:
    known, said = WORDS[name]
    said_of = [(set(said(old)), set(said(new))) for old, new in steps]
    for word in known:
        if not any(word in new - old for old, new in said_of):
            yield (
                f"no change enters {name}: {word}; add a plan with it to tests/adapt/walks.py, or, where this kind of "
                f"model does not take {name}, the reason to `cannot` there"
            )
        elif not any(word in old - new for old, new in said_of):
            yield f"no change leaves {name}: {word}; add a plan without it after that in tests/adapt/walks.py"
