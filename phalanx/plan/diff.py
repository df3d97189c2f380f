"""What changes from one plan to another, as data and in one line for people."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from phalanx.plan.fields import FORMS
from phalanx.plan.plan import Plan

# What a field's empty value says to a reader.
_EMPTY = {
    "slices": "none",
    "stages": "undecided",
    "zero_degree": "dp",
    "gather": "default",
    "reduce": "default",
    "degrees": "tp",
    "save": "default",
}


class Change(NamedTuple):
    field: str
    old: object
    new: object


def diff(old: Plan, new: Plan) -> list[Change]:
    """The fields in which the plans differ, in the order of definition."""
    changes = (Change(f.name, getattr(old, f.name), getattr(new, f.name)) for f in dataclasses.fields(Plan))
    return [change for change in changes if change.old != change.new]


def diff_text(old: Plan, new: Plan) -> str:
    """`mb 4 → 8, schedule 1f1b → zb-h1; the rest is the same`."""
    changes = diff(old, new)
    if not changes:
        return "the plans are the same"
    shown = ", ".join(f"{name} {_shown(name, before)} → {_shown(name, after)}" for name, before, after in changes)
    return f"{shown}; the rest is the same" if len(changes) < len(FORMS) else shown


def _shown(name: str, value: object) -> str:
    return _EMPTY[name] if name in _EMPTY and not value else FORMS[name].write(value)
