"""How each field of a plan is written: in the one-line text, and as a JSON or Python value.

Reads what was given into a mapping of only those fields, so that `complete` can tell what is still to be decided. Which
values go together is not known here (`rules.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from phalanx.errors import PlanError, nearest
from phalanx.plan import degrees, slicing

Fields = dict[str, Any]  # a plan's fields by name, as many as are given

MAY_BE_EMPTY = ("slices", "stages", "gather", "reduce", "degrees", "save")  # an empty one says as much as none at all
EXAMPLE = "mb=4,schedule=gpipe"


@dataclass(frozen=True)
class Form:
    """How one field is written. `read` raises a PlanError, for which it gets the field's name; `take` a TypeError."""

    read: Callable[[str, str], object]
    write: Callable[[Any], str]
    take: Callable[[Any], object]
    example: object


def read(text: str) -> Fields:
    """The fields that a one-line text gives; the error names the word and what may stand there."""
    fields: Fields = {}
    seen: set[str] = set()
    for word in filter(None, (part.strip() for part in text.split(","))):
        name, separator, value = word.partition("=")
        if not separator:
            raise PlanError(f"plan: '{word}' is not name=value", f"write for example {EXAMPLE}")
        if name in seen:
            raise PlanError(f"plan: '{name}' is given twice", "write each field once")
        seen.add(name)
        fields[name] = _form(name).read(name, value)
    return fields


def take(mapping: Mapping[str, Any]) -> Fields:
    """The fields that a mapping (a JSON or YAML file) gives; the error names the field and what may stand there."""
    fields = {name: take_value(name, value) for name, value in mapping.items()}
    return {name: value for name, value in fields.items() if value or name not in MAY_BE_EMPTY}


def take_value(name: str, value: object) -> object:
    """`value` as the field holds it, once it is known to have the field's type."""
    form = _form(name)
    try:
        return form.take(value)
    except TypeError:
        hint = f"write for example {form.example!r}"
        raise PlanError(f"plan: {name}={value!r} has the wrong type", hint) from None


def write(fields: Mapping[str, object]) -> str:
    """The one-line text that `read` reads back to these fields."""
    return ",".join(f"{name}={FORMS[name].write(value)}" for name, value in fields.items())


def _form(name: str) -> Form:
    if name not in FORMS:
        raise PlanError(f"plan: unknown field '{name}'", nearest(name, FORMS))
    return FORMS[name]


def _read_number(name: str, text: str) -> int:
    try:
        # int() alone also takes signs, spaces and underscores.
        return int(text if text.isascii() and text.isdecimal() else "")
    except ValueError:
        raise PlanError(f"plan: {name}='{text}' is not a whole number", f"use {name}={_ALLOWED[name]}") from None


def _take_number(value: object) -> int:
    if type(value) is not int:
        raise TypeError
    return value


def _read_counts(name: str, text: str) -> tuple[int, ...]:
    parts = text.split("-")
    if not all(part.isascii() and part.isdecimal() and len(part) < 10 for part in parts):
        message = f"plan: {name}='{text}' is not a list of block counts"
        raise PlanError(message, f"write one count per stage, joined by '-', for example {name}=3-4-4-3")
    return tuple(int(part) for part in parts)


def _take_counts(value: object) -> tuple[int, ...]:
    if not isinstance(value, list | tuple):
        raise TypeError
    return tuple(_take_number(count) for count in cast(list[object] | tuple[object, ...], value))


def _read_yes_or_no(name: str, text: str) -> bool:
    if text not in ("yes", "no"):
        raise PlanError(f"plan: {name}='{text}' is neither yes nor no", f"use {name}=yes or {name}=no")
    return text == "yes"


def _take_yes_or_no(value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError
    return value


def _read_word(name: str, text: str) -> str:
    if not text:
        raise PlanError(f"plan: '{name}=' says nothing", f"write for example {name}={FORMS[name].example}")
    return text


def _take_word(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


def _number(example: int) -> Form:
    return Form(_read_number, str, _take_number, example)


def _yes_or_no() -> Form:
    return Form(_read_yes_or_no, lambda value: "yes" if value else "no", _take_yes_or_no, False)


def _word(example: str) -> Form:
    return Form(_read_word, str, _take_word, example)


_ALLOWED = {
    "pp": "1 or more",
    "dp": "1 or more",
    "tp": "1 or more",
    "mb": "1 or more",
    "v": "1 or more",
    "zero": "0, 1, 2 or 3",
    "zero_degree": "2 or more",
}

FORMS: Mapping[str, Form] = {
    "pp": _number(1),
    "dp": _number(1),
    "tp": _number(1),
    "mb": _number(1),
    "slices": Form(slicing.read_slicings, slicing.write_slicings, slicing.take_slicings, slicing.EXAMPLE),
    "schedule": _word("1f1b"),
    "v": _number(1),
    "stages": Form(_read_counts, lambda counts: "-".join(map(str, counts)), _take_counts, [3, 4, 4, 3]),
    "recompute": _yes_or_no(),
    "zero": _number(0),
    "zero_degree": _number(2),
    "gather": _word("step"),
    "reduce": _word("step"),
    "degrees": Form(degrees.read_degrees, degrees.write_degrees, degrees.take_degrees, degrees.EXAMPLE),
    "sequence": _yes_or_no(),
    "save": _word("result"),
    "overlap": _word("oases"),
    "pairs": _yes_or_no(),
    "replicate": _yes_or_no(),
}
