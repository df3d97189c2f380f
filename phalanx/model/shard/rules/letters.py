"""Rules of products over named dims: einsum, whose dims are letters, and convolutions, whose channels are split.

A split follows its letter. Where the letter is summed over, each rank has a summand.
"""

from __future__ import annotations

import math
import string
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from phalanx.model.shard.placement import PARTIAL, WHOLE, Conflict, Placement, Range, tiles, total
from phalanx.model.shard.rules.common import not_repeated, only_ranges, otherwise
from phalanx.model.shard.rules.pointwise import leading, meet
from phalanx.model.shard.rules.views import keep_together
from phalanx.model.shard.walk import Place, Walk, shape

aten = torch.ops.aten


def einsum(walk: Walk, node: fx.Node) -> Place:
    equation, operands = node.args[:2]
    assert isinstance(equation, str) and isinstance(operands, list | tuple)
    values = [value for value in operands if isinstance(value, fx.Node)]
    places = {value: walk.need_home(node, value) for value in values}
    splits = {value: place for value, place in places.items() if place.kind == "split"}
    if not splits or "->" not in equation:
        return otherwise(walk, node)
    inputs, output = _without_ellipsis(equation.replace(" ", ""), shape(values[0])).split("->")
    letters = dict(zip(values, inputs.split(","), strict=True))
    first, place = leading(splits)
    letter = letters[first][place.dim]
    for value in values:
        _follow(walk, node, value, place, letters[value].find(letter))
    if letter in output:
        return place.moved(output.index(letter))
    not_repeated(place)
    if not tiles(place.cuts):
        raise Conflict("ranks have the same part of what is summed", place)
    return PARTIAL


def _without_ellipsis(equation: str, first: Sequence[int]) -> str:
    """With a letter for each dim that `...` stands for. first: the shape of the first operand."""
    named = equation.split(",")[0].split("->")[0]
    number = len(first) - len(named.replace("...", ""))
    unused = [letter for letter in string.ascii_letters if letter not in equation]
    return equation.replace("...", "".join(unused[:number]))


def _follow(walk: Walk, node: fx.Node, value: fx.Node, place: Placement, dim: int) -> None:
    """Makes an operand lie like the leading one; `dim`: which of its dims has that letter, -1 where none does."""
    spans = dim >= 0
    own = walk.of(value, node)
    if own.kind == "split":
        meet(walk, place.moved(dim), own, spans)
    elif walk.is_weight(value):
        if spans:
            walk.follow(value, dim, place, node)
    elif walk.live[value]:
        walk.need(node, value, place.moved(dim) if spans else WHOLE)
    elif spans:
        walk.wants[node, value] = place.moved(dim)


def convolution(walk: Walk, node: fx.Node) -> Place:
    """Of [samples, channels, …]. Output channels are split as a product's columns, input channels as its rows; groups
    of channels, which see only each other, stay together and stay split; where no split can go on, ranks' channels are
    summands."""
    x, weight = node.args[:2]
    assert isinstance(x, fx.Node) and isinstance(weight, fx.Node)
    groups: Any = node.args[6] if len(node.args) > 6 else 1
    if not walk.is_weight(weight) or node.kwargs or (len(node.args) > 2 and node.args[2] is not None):
        return otherwise(walk, node)
    place = walk.need_home(node, x)
    if place.kind == "split" and place.dim != 1:
        raise Conflict("a convolution along a split dim", place)
    if groups > 1:
        return _of_groups(walk, node, place, groups)
    if place.kind == "split":
        not_repeated(place)
        if not tiles(place.cuts):
            raise Conflict("ranks have the same part of what is summed", place)
        walk.follow(weight, 1, place, node)
        return PARTIAL
    walk.need_whole(node, x)
    return WHOLE if walk.is_done_whole(node) else walk.cut_weight(weight, 0, node).moved(1)


def _of_groups(walk: Walk, node: fx.Node, place: Placement, groups: int) -> Place:
    x, weight = node.args[:2]
    assert isinstance(x, fx.Node) and isinstance(weight, fx.Node)
    of_x, of_weight = shape(x)[1] // groups, shape(weight)[0] // groups
    if place.kind == "split":
        not_repeated(place)
        _whole_groups(walk, place, of_x)
        found = place.scaled(1, times=of_weight, by=of_x)
        walk.follow(weight, 0, found, node)
    elif walk.is_done_whole(node):
        walk.need_whole(node, x)
        return WHOLE
    else:
        found = walk.cut_weight(weight, 0, node).moved(1)
        _whole_groups(walk, found, of_weight)
        wanted = found.scaled(1, times=of_x, by=of_weight)
        if walk.live[x]:
            walk.need(node, x, wanted)
        else:  # an input of the model, which every rank has
            walk.wants[node, x] = wanted
    sizes = [total(ranges) // of_weight for ranges in found.cuts]
    ended = place.kind == "split" and node in walk.choices.ended
    if ended:
        only_ranges(found)

    def built(build: Any, rank: int) -> Any:
        local = build.call(node.target, *map(build.of, node.args[:6]), sizes[rank])
        return _in_its_place(build, local, shape(node), found.cuts[rank][0]) if ended else local

    walk.rewritten[node] = built
    if ended or place.kind != "split":
        return PARTIAL if ended else found
    assert found.origin is not None
    return replace(found, origin=replace(found.origin, last=node))


def _in_its_place(build: Any, local: Any, whole: Sequence[int], part: Range) -> Any:
    """Some channels among zeros in the place of the others: a summand of all of them."""
    around = [0, 0] * (len(whole) - 2) + [part[0], whole[1] - part[1]]
    return build.call(aten.constant_pad_nd.default, local, around)


def _whole_groups(walk: Walk, place: Placement, size: int) -> None:
    if math.gcd(*(edge for ranges in place.cuts for part in ranges for edge in part), size) != size:
        keep_together(walk, place, size)
