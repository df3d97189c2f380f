"""How each field of a plan is written: in the one-line text, and as a JSON or Python value.

Reads what was given into a mapping of only those fields, so that `complete` can tell what is still to be decided. Which
values go together is not known here (`rules.py`).

Three fields have a grammar of their own. Slicings: lengths joined by '-', slicings by '/', a single number for so many
equal slices, as in `512-512-1024` and `3-2-1/4`; lengths are relative, so that one fits sequences of any length.
Degrees: a layer's units joined by ':', layers by '+', equal ones counted with '*', as in `4:4*2+2:1*6`. Recompute: a
word for every block, or one for each layer, written as degrees are: `block*8+light*24`. That of `offload` is in
`offload.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Any, cast

from phalanx.errors import PlanError, nearest
from phalanx.plan.offload import EXAMPLE as OFFLOAD_EXAMPLE
from phalanx.plan.offload import read_offload, take_offload, write_offload

Slicings = tuple[tuple[int, ...], ...]  # of the micro-batches in turn: micro-batch i has slicing i % their number

SLICES_EXAMPLE = [[512, 512, 1024], [1, 1]]

_SLICING = re.compile(r"\d{1,4}|\d{1,9}(?:-\d{1,9})+", re.ASCII)


def read_slicings(name: str, text: str) -> Slicings:
    """Reads what `write_slicings` wrote; the error names the word and what may stand there."""
    slicings: list[tuple[int, ...]] = []
    for word in text.split("/"):
        if _SLICING.fullmatch(word) is None:
            place = f"plan: {name}='{text}': " if word != text else f"plan: {name}="
            form = "the number of equal slices, or lengths joined by '-'; different slicings joined by '/'"
            raise PlanError(f"{place}'{word}' is not a slicing", f"write {form}: {name}=4, {name}=512-512-1024/3-1")
        lengths = [int(length) for length in word.split("-")]
        slicings.append((1,) * lengths[0] if len(lengths) == 1 else _canonical(lengths))
    return tuple(slicings)


def write_slicings(slicings: Slicings) -> str:
    """The shortest text that `read_slicings` reads back."""
    return "/".join(str(len(s)) if s == (1,) * len(s) else "-".join(map(str, s)) for s in slicings)


def take_slicings(value: object) -> Slicings:
    """The same from lists, as a JSON file has them; raises a TypeError."""
    slicings = [_items(slicing) for slicing in _items(value)]
    if any(type(length) is not int for slicing in slicings for length in slicing):
        raise TypeError
    return tuple(_canonical(cast(Sequence[int], slicing)) for slicing in slicings)


def bounds(slicing: Sequence[int], tokens: int) -> tuple[int, ...]:
    """Where `tokens` are cut: one edge more than there are slices, each slice with at least one token.

    Lengths that add up to `tokens` are taken exactly, others scaled and rounded.
    """
    number, total = len(slicing), sum(slicing)
    if tokens < number:
        message = f"plan: slices={write_slicings((tuple(slicing),))} cuts {tokens} tokens into {number} slices"
        raise PlanError(message, f"use {tokens} slices or fewer, or longer sequences")
    edges = [0]
    for i, end in enumerate(accumulate(slicing), start=1):
        rounded = -((total - 2 * tokens * end) // (2 * total))  # to the nearest, of two the lower
        edges.append(min(max(rounded, edges[-1] + 1), tokens - (number - i)))
    return tuple(edges)


def _canonical(slicing: Sequence[int]) -> tuple[int, ...]:
    """Equal slices are the same whatever their length."""
    equal = len(set(slicing)) == 1 and slicing[0] > 0
    return (1,) * len(slicing) if equal else tuple(slicing)


Degrees = tuple[tuple[int, ...], ...]  # of each layer's units; one layer stands for all, one number for all its units

DEGREES_EXAMPLE = [[4, 4], [2, 1]]

_LAYERS = re.compile(r"(\d{1,6}(?::\d{1,6})*)(?:\*([1-9]\d{0,3}))?", re.ASCII)


def read_degrees(name: str, text: str) -> Degrees:
    """Reads what `write_degrees` wrote; the error names the word and what may stand there."""
    layers: list[tuple[int, ...]] = []
    for word in text.split("+"):
        match = _LAYERS.fullmatch(word)
        if match is None:
            place = f"plan: {name}='{text}': " if word != text else f"plan: {name}="
            form = "a layer's units joined by ':', layers by '+', equal ones counted with '*'"
            raise PlanError(f"{place}'{word}' is not the degrees of a layer", f"write {form}: {name}=4:4*2+2:1*6")
        units, count = match.groups()
        layers += [tuple(int(unit) for unit in units.split(":"))] * int(count or 1)
    return tuple(layers)


def write_degrees(degrees: Degrees) -> str:
    """The shortest text that `read_degrees` reads back."""
    runs = ((":".join(map(str, units)), len(list(equal))) for units, equal in groupby(degrees))
    return "+".join(units if count == 1 else f"{units}*{count}" for units, count in runs)


def take_degrees(value: object) -> Degrees:
    """The same from lists, as a JSON file has them; raises a TypeError."""
    return tuple(_take_units(layer) for layer in _items(value))


def degrees_of_layer(degrees: Degrees, layer: int, num_units: int, num_layers: int) -> tuple[int, ...]:
    """One degree for each unit of a layer; a PlanError where not as many are given as the model has."""
    assert degrees and 0 <= layer < num_layers
    if len(degrees) > 1:
        check_layers(f"degrees={write_degrees(degrees)}", len(degrees), num_layers)
    units = degrees[layer if len(degrees) > 1 else 0]
    if len(units) == 1:
        return units * num_units
    if len(units) != num_units:
        shown = ":".join(map(str, units))
        message = f"plan: degrees={shown} is for {len(units)} units, and layer {layer} of the model has {num_units}"
        raise PlanError(message, f"give layer {layer} {num_units} degrees, or one that stands for all its units")
    return units


def check_layers(given: str, count: int, num_layers: int) -> None:
    """For what a plan gives layer by layer."""
    if count == num_layers:
        return
    first = min(count, num_layers)
    lacks = f"layer {first} has none" if count < num_layers else f"there is no layer {first}"
    message = f"plan: {given} is for {count} layers, and the model has {num_layers}"
    raise PlanError(f"{message}: {lacks}", f"give {num_layers} layers, or one that stands for all")


def _take_units(value: object) -> tuple[int, ...]:
    units = _items(value)
    if not units or any(type(unit) is not int for unit in units):
        raise TypeError
    return tuple(cast(Sequence[int], units))


def _items(value: object) -> Sequence[object]:
    if not isinstance(value, list | tuple):
        raise TypeError
    return cast(Sequence[object], value)


Policies = tuple[str, ...]  # what is computed again: one word for every block, or one for each layer

POLICIES = ("none", "light", "unit", "block")  # each keeps less than the one before it
_SHORT = {"no": "none", "yes": "block"}
_POLICY = re.compile(r"([a-z]+)(?:\*([1-9]\d{0,3}))?", re.ASCII)


def read_policies(name: str, text: str) -> Policies:
    """Reads what `write_policies` wrote, and `yes` and `no`; the error names the word and what may stand there."""
    policies: list[str] = []
    for word in text.split("+"):
        match = _POLICY.fullmatch(word)
        policy = _SHORT.get(match[1], match[1]) if match else ""
        if match is None or policy not in POLICIES:
            place = f"plan: {name}='{text}': " if word != text else f"plan: {name}="
            form = f"use {', '.join(POLICIES[:-1])} or {POLICIES[-1]}, or one for each layer: {name}=block*8+light*24"
            raise PlanError(f"{place}'{word}' does not say what is computed again", form)
        policies += [policy] * int(match[2] or 1)
    return tuple(policies)


def write_policies(policies: Policies) -> str:
    """The shortest text that `read_policies` reads back."""
    runs = ((policy, len(list(equal))) for policy, equal in groupby(policies))
    return "+".join(policy if count == 1 else f"{policy}*{count}" for policy, count in runs) or "none"


def _take_policies(value: object) -> Policies:
    """The same from a word or a list of words; raises a TypeError. False says nothing, as plans in files do where
    another field decides."""
    if isinstance(value, bool):
        return ("block",) if value else ()
    words = [value] if isinstance(value, str) else _items(value)
    if not all(isinstance(word, str) for word in words):
        raise TypeError
    return tuple(policy for word in cast(Sequence[str], words) for policy in read_policies("recompute", word))


Fields = dict[str, Any]  # a plan's fields by name, as many as are given

# An empty one says as much as none at all.
MAY_BE_EMPTY = ("slices", "stages", "recompute", "gather", "reduce", "degrees", "save", "sums", "offload")
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
        if "=" in value:
            raise PlanError(f"plan: '{word}' holds several fields", f"put commas between them: {EXAMPLE}")
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
    "slices": Form(read_slicings, write_slicings, take_slicings, SLICES_EXAMPLE),
    "schedule": _word("1f1b"),
    "v": _number(1),
    "stages": Form(_read_counts, lambda counts: "-".join(map(str, counts)), _take_counts, [3, 4, 4, 3]),
    "recompute": Form(read_policies, write_policies, _take_policies, "light"),
    "zero": _number(0),
    "zero_degree": _number(2),
    "gather": _word("step"),
    "reduce": _word("step"),
    "degrees": Form(read_degrees, write_degrees, take_degrees, DEGREES_EXAMPLE),
    "sequence": _yes_or_no(),
    "save": _word("result"),
    "overlap": _word("oases"),
    "pairs": _yes_or_no(),
    "replicate": _yes_or_no(),
    "offload": Form(read_offload, write_offload, take_offload, OFFLOAD_EXAMPLE),
    "sums": _word("exact"),
}
