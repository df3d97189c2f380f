"""Rules of operators that only rearrange: reshapes, transpositions, joins.

A split survives a reshape where dims are divided or merged in groups of equal size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from torch import fx

from phalanx.model.shard.placement import PARTIAL, WHOLE, Conflict, Cutting, Origin, Placement, groups, total
from phalanx.model.shard.rules.common import otherwise, same_if_partial
from phalanx.model.shard.walk import Place, Rule, Walk, shape


def carried(walk: Walk, place: Placement, before: Sequence[int], after: Sequence[int]) -> Placement:
    """Where a split lies after a reshape."""
    old, new = next((o, n) for o, n in groups(before, after) if place.dim in o)
    outside = place.outer * math.prod(before[d] for d in old if d < place.dim)
    inner_before = math.prod(before[d] for d in old if d > place.dim)
    target, outer = _target(place, outside, new, after)
    inner_after = math.prod(after[d] for d in new if d > target)
    if inner_after >= inner_before:  # divided: whole inner parts stay together
        by = inner_after // inner_before
        if any(edge % by for ranges in place.cuts for part in ranges for edge in part):
            keep_together(walk, place, by)
        return replace(place.scaled(target, by=by), outer=outer)
    return replace(place.scaled(target, times=inner_before // inner_after), outer=outer)


def _target(place: Placement, outside: int, new: range, after: Sequence[int]) -> tuple[int, int]:
    """The dim that holds the split one after a reshape, and how often it is repeated there. `outside`: how many
    elements the dims outside of it have that hold the same elements together with it."""
    for dim in new:  # a new dim of size 1 may be the only key/value head: it stays whole, and every rank has it
        if outside == 1:
            return dim, 1
        if outside % after[dim] and after[dim] % outside == 0:
            return dim, outside
        if outside % after[dim]:
            break
        outside //= after[dim]
    raise Conflict("a split dim is divided otherwise than it was merged", place)


def keep_together(walk: Walk, place: Placement, by: int) -> None:
    """Refines the cuts of all sections that a value spans: `by` neighbouring indices stay on one rank."""

    def change(cutting: Cutting, origin: Origin) -> bool:
        stop = origin.element(max(stop for ranges in place.cuts for _, stop in ranges))
        found = {start: (end - start) for start, end in cutting.sections() if origin.offset <= start < stop}
        granules = {start: math.lcm(cutting.granules.get(start, 1), origin.elements(by)) for start in found}
        if any(found[start] % granule for start, granule in granules.items()):
            return False
        changed = [start for start, granule in granules.items() if granule != cutting.granules.get(start, 1)]
        cutting.granules |= granules
        for start in changed:
            cutting.given.pop(start, None)
        return bool(changed)

    walk.refine(place, change)


def reshape(walk: Walk, node: fx.Node) -> Place:
    x, sizes = node.args[0], node.args[1]
    assert isinstance(x, fx.Node)
    place = walk.of(x, node)
    if place.kind == "partial":
        return walk.need(node, x, PARTIAL)
    if place.kind == "tokens":
        walk.need_whole(node, x)
        return WHOLE
    if place.kind == "whole":
        walk.need(node, x, WHOLE)
        return WHOLE
    result = carried(walk, place, shape(x), shape(node))
    new = list(sizes) if not isinstance(sizes, int) else [sizes]  # pyright: ignore
    if new[result.dim] != -1:
        walk.rewritten[node] = _local_reshape(node, x, place, result, new)
    return result


def _local_reshape(node: fx.Node, x: fx.Node, place: Placement, result: Placement, sizes: list[Any]) -> Any:
    """The same reshape with the rank's own size of the split dim; one that depends on the batch is left to torch."""
    dim = result.dim
    if isinstance(sizes[dim], fx.Node) or result.outer > 1:
        if -1 not in sizes:
            sizes = [*sizes[:dim], -1, *sizes[dim + 1 :]]
        elif (merged := _only_merges(shape(x), shape(node), dim)) is not None:
            return lambda build, rank: build.call(torch.ops.aten.flatten.using_ints, build.of(x), merged[0], merged[-1])
        else:
            raise Conflict("a split dim has a size that is not a constant", place)
        return lambda build, rank: build.call(node.target, build.of(x), [*map(build.of, sizes)])
    return lambda build, rank: build.call(
        node.target, build.of(x),
        [*map(build.of, sizes[:dim]), total(result.cuts[rank]), *map(build.of, sizes[dim + 1 :])],
    )  # fmt: skip


def _only_merges(before: Sequence[int], after: Sequence[int], dim: int) -> range | None:
    """The dims that a reshape merges into `dim`, if it leaves all others as they are."""
    found = groups(before, after)
    if any(len(new) != 1 or (len(old) != 1 and dim not in new) for old, new in found):
        return None
    return next(old for old, new in found if dim in new)


def flatten(walk: Walk, node: fx.Node) -> Place:
    x = node.args[0]
    assert isinstance(x, fx.Node)
    place = walk.of(x, node)
    if place.kind == "split":
        return carried(walk, place, shape(x), shape(node))
    return same_if_partial(walk, node)


def unflatten(walk: Walk, node: fx.Node) -> Place:
    x, dim, sizes = node.args
    assert isinstance(x, fx.Node) and isinstance(sizes, list | tuple)
    place = walk.of(x, node)
    if place.kind != "split":
        return same_if_partial(walk, node)
    result = carried(walk, place, shape(x), shape(node))
    at = int(dim) % len(shape(x))  # pyright: ignore
    if at != place.dim or sizes[result.dim - at] == -1:
        return result
    if -1 in sizes:
        raise Conflict("a split dim is divided into parts of unknown number", place)
    own = [*sizes[: result.dim - at], -1, *sizes[result.dim - at + 1 :]]
    walk.rewritten[node] = lambda build, rank: build.call(node.target, build.of(x), at, [*map(build.of, own)])
    return result


def expand(walk: Walk, node: fx.Node) -> Place:
    """Heads that are repeated, say: other dims than the split one grow."""
    x, sizes = node.args[0], node.args[1]
    assert isinstance(x, fx.Node) and isinstance(sizes, list | tuple)
    place = walk.of(x, node)
    if place.kind != "split":
        return same_if_partial(walk, node)
    result = place.moved(place.dim + len(sizes) - len(shape(x)))
    if shape(node)[result.dim] != shape(x)[place.dim]:
        raise Conflict("a split dim is repeated", place)
    if sizes[result.dim] != -1:
        walk.rewritten[node] = lambda build, rank: build.call(
            node.target, build.of(x), [*map(build.of, sizes[: result.dim]), -1, *map(build.of, sizes[result.dim + 1 :])]
        )
    return result


def repeat(walk: Walk, node: fx.Node) -> Place:
    """As often as said per dim; of a split dim that is repeated, ranks have their part of each repetition."""
    x, times = node.args[0], node.args[1]
    assert isinstance(x, fx.Node) and isinstance(times, list | tuple)
    place = walk.of(x, node)
    if place.kind != "split":
        return same_if_partial(walk, node)
    result = place.moved(place.dim + len(times) - len(shape(x)))
    number, size = times[result.dim], shape(x)[place.dim]
    if number == 1:
        return result
    if not isinstance(number, int) or place.outer > 1:
        raise Conflict("a split dim is repeated", place)
    return result.joined(
        tuple(tuple((a + n * size, b + n * size) for n in range(number) for a, b in own) for own in place.cuts)
    )


def pad(walk: Walk, node: fx.Node) -> Place:
    """More elements around others, by two numbers per dim from the last one on."""
    x, around = node.args[0], node.args[1]
    assert isinstance(x, fx.Node) and isinstance(around, list | tuple)
    if node.kwargs:
        return otherwise(walk, node)
    place = walk.of(x, node)
    mode, value = (*node.args[2:4], *("constant", None)[len(node.args) - 2 :])
    if node.target is not torch.ops.aten.pad.default:
        mode, value = "constant", node.args[2] if len(node.args) > 2 else None
    if place.kind == "partial" and mode == "constant" and not value:
        return PARTIAL
    if place.kind != "split":
        walk.need_whole(node, x)
        return WHOLE
    first = 2 * (len(shape(x)) - 1 - place.dim)
    if any(isinstance(number, fx.Node) or number for number in around[first : first + 2]):
        raise Conflict("a split dim is padded", place)
    return place


def windows(walk: Walk, node: fx.Node) -> Place:
    """im2col: the windows around each place, those of a channel beside each other."""
    x, kernel = node.args[0], node.args[1]
    assert isinstance(x, fx.Node) and isinstance(kernel, list | tuple)
    place = walk.of(x, node)
    if place.kind != "split":
        return same_if_partial(walk, node)
    channels = len(shape(x)) - 3
    if place.dim != channels:
        raise Conflict("windows along a split dim", place)
    return place.scaled(channels, times=math.prod(kernel))  # pyright: ignore


def dims_moved(move: Callable[[fx.Node, int, int], int]) -> Rule:
    """A rule for views that only renumber dims."""

    def rule(walk: Walk, node: fx.Node) -> Place:
        x = node.args[0]
        assert isinstance(x, fx.Node)
        if walk.is_weight(x):
            return WHOLE
        place = walk.of(x, node)
        if place.kind == "split":
            return place.moved(move(node, place.dim, len(shape(x))))
        return same_if_partial(walk, node)

    return rule


def pairs(walk: Walk, node: fx.Node) -> Place:
    """Pairs of numbers as complex ones, and back: the last dim appears or goes."""
    x = node.args[0]
    assert isinstance(x, fx.Node)
    place = walk.of(x, node)
    if place.kind != "split":
        walk.need_whole(node, x)
        return WHOLE
    if place.dim == len(shape(node)):
        raise Conflict("a pair that makes a complex number is split", place)
    return place


def transposed(node: fx.Node, dim: int, rank: int) -> int:
    a, b = (int(d) % rank for d in node.args[1:3])  # pyright: ignore
    return {a: b, b: a}.get(dim, dim)


def permuted(node: fx.Node, dim: int, rank: int) -> int:
    return [int(d) % rank for d in node.args[1]].index(dim)  # pyright: ignore


def unsqueezed(node: fx.Node, dim: int, rank: int) -> int:
    at = int(node.args[1]) % (rank + 1)  # pyright: ignore
    return dim + (at <= dim)


def squeezed(node: fx.Node, dim: int, rank: int) -> int:
    at = int(node.args[1]) % rank  # pyright: ignore
    return dim - (at < dim)


def cat(walk: Walk, node: fx.Node) -> Place:
    return _joined(walk, node, new_dim=False)


def stack(walk: Walk, node: fx.Node) -> Place:
    return _joined(walk, node, new_dim=True)


def _joined(walk: Walk, node: fx.Node, new_dim: bool) -> Place:
    parts: Any = node.args[0]
    places = [walk.of(part, node) for part in parts]
    if all(p.kind == "partial" for p in places):
        return PARTIAL
    if not any(p.kind == "split" for p in places):
        return otherwise(walk, node)
    place = next(p for p in places if p.kind == "split")
    at = int(node.args[1] if len(node.args) > 1 else 0) % len(shape(node))  # pyright: ignore
    if not new_dim and at == place.dim:
        return _one_after_the_other(places, [shape(part)[at] for part in parts])
    if any(p.kind != "whole" and not p.same_as(place) for p in places):
        raise Conflict("values are joined that are not split alike", *places)
    for part in parts:
        if walk.is_weight(part):
            walk.follow(part, place.dim, place, node)
        elif walk.live[part]:
            walk.need(node, part, place)
        else:
            walk.wants[node, part] = place
    return place.moved(place.dim + (new_dim and at <= place.dim))


def _one_after_the_other(places: Sequence[Placement], sizes: Sequence[int]) -> Placement:
    """Splits that are joined along the dim that they split: ranks have their part of each."""
    first = places[0]
    if any(p.kind != "split" or (p.dim, p.outer) != (first.dim, 1) for p in places):
        raise Conflict("values are joined that are not split alike", *places)
    starts = accumulate(sizes, initial=0)
    shifted = [
        [tuple((a + start, b + start) for a, b in own) for own in p.cuts]
        for start, p in zip(starts, places, strict=False)
    ]
    return first.joined(tuple(tuple(part for own in rank for part in own) for rank in zip(*shifted, strict=True)))
