"""Slicings: how the tokens of micro-batches are cut into slices, and how that is written.

A slicing is a tuple of relative lengths, so that one fits sequences of any length. Text: lengths joined by '-',
slicings by '/', a single number for so many equal slices: `512-512-1024`, `3-2-1/4`. Which slicing is good is not known
here.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, cast

from phalanx.errors import PlanError
from phalanx.plan.divisors import listed

if TYPE_CHECKING:
    from phalanx.plan.plan import Plan

Slicings = tuple[tuple[int, ...], ...]  # of the micro-batches in turn: micro-batch i has slicing i % their number

EXAMPLE = [[512, 512, 1024], [1, 1]]
SCHEDULES = ("1f1b", "eager-1f1b", "gpipe", "zb-h1")  # that order slices

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


def check_slices(plan: Plan) -> None:
    """Raises a PlanError for the first rule that the plan breaks."""
    shown = f"slices={write_slicings(plan.slices)}"
    for slicing in plan.slices:
        if not slicing or min(slicing) < 1:
            at = f", slice {next(i for i, length in enumerate(slicing) if length < 1)}" if slicing else ""
            raise PlanError(f"plan: {shown} has a slice without tokens{at}", "give every slice a length of 1 or more")
    if plan.slices and max(map(len, plan.slices)) == 1:
        message = f"plan: {shown} does nothing: micro-batches of one slice are whole"
        raise PlanError(message, "use slices=2 or more, or leave slices out")
    if plan.slices and plan.schedule not in SCHEDULES:
        reason = "it orders whole micro-batches, and slices go forward in order and backward in reverse"
        message = f"plan: {shown} cannot be ordered by schedule={plan.schedule}: {reason}"
        raise PlanError(message, f"use schedule={listed(SCHEDULES)}, or leave slices out")


def _canonical(slicing: Sequence[int]) -> tuple[int, ...]:
    """Equal slices are the same whatever their length."""
    equal = len(set(slicing)) == 1 and slicing[0] > 0
    return (1,) * len(slicing) if equal else tuple(slicing)


def _items(value: object) -> Sequence[object]:
    if not isinstance(value, list | tuple):
        raise TypeError
    return cast(Sequence[object], value)
