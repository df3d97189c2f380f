"""Tensor degrees per layer and unit: how they are written, and which of them a layer of the model gets.

Text: units joined by ':', layers by '+', equal ones counted with '*', as in `4:4*2+2:1*6`. Whether a degree suits `tp`
is not known here (`tensor.py`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby
from typing import cast

from phalanx.errors import PlanError

Degrees = tuple[tuple[int, ...], ...]  # of each layer's units; one layer stands for all, one number for all its units

EXAMPLE = [[4, 4], [2, 1]]

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
    if len(degrees) not in (1, num_layers):
        first = min(len(degrees), num_layers)
        lacks = f"layer {first} has none" if len(degrees) < num_layers else f"there is no layer {first}"
        message = f"plan: degrees={write_degrees(degrees)} is for {len(degrees)} layers, and the model has {num_layers}"
        raise PlanError(f"{message}: {lacks}", f"give {num_layers} layers, or one that stands for all")
    units = degrees[layer if len(degrees) > 1 else 0]
    if len(units) == 1:
        return units * num_units
    if len(units) != num_units:
        shown = ":".join(map(str, units))
        message = f"plan: degrees={shown} is for {len(units)} units, and layer {layer} of the model has {num_units}"
        raise PlanError(message, f"give layer {layer} {num_units} degrees, or one that stands for all its units")
    return units


def _take_units(value: object) -> tuple[int, ...]:
    units = _items(value)
    if not units or any(type(unit) is not int for unit in units):
        raise TypeError
    return tuple(cast(Sequence[int], units))


def _items(value: object) -> Sequence[object]:
    if not isinstance(value, list | tuple):
        raise TypeError
    return cast(Sequence[object], value)
