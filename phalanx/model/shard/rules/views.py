"""Rules of operators that only rearrange: reshapes, transpositions, joins.

A split survives a reshape where dims are divided or merged in groups of equal size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from phalanx.model.shard.placement import PARTIAL, WHOLE, Conflict, Cutting, Origin, Placement, total
from phalanx.model.shard.rules.common import otherwise, same_if_partial
from phalanx.model.shard.walk import Place, Rule, Walk, shape


def groups(before: Sequence[int], after: Sequence[int]) -> list[tuple[range, range]]:
    """Runs of dims before and after that hold the same elements."""
    found: list[tuple[range, range]] = []
    i = j = 0
    while i < len(before) or j < len(after):
        first_i, first_j = i, j
        left = right = 1
        while i < len(before) and before[i] == 1 and (j >= len(after) or after[j] != 1):
            i += 1
        while j < len(after) and after[j] == 1 and (i >= len(before) or before[i] != 1):
            j += 1
        if i < len(before):
            left, i = before[i], i + 1
        if j < len(after):
            right, j = after[j], j + 1
        while left != right:
            if left < right:
                left, i = left * before[i], i + 1
            else:
                right, j = right * after[j], j + 1
        found.append((range(first_i, i), range(first_j, j)))
    return found


def carried(walk: Walk, place: Placement, before: Sequence[int], after: Sequence[int]) -> Placement:
    """Where a split lies after a reshape. The split dim must be the outermost of what is divided or merged."""
    old, new = next((o, n) for o, n in groups(before, after) if place.dim in o)
    outer = [d for d in old if d < place.dim and before[d] != 1]
    if outer:
        raise Conflict("a split dim is merged into another", place)
    inner_before = math.prod(before[d] for d in old if d > place.dim)
    target = new[0]  # a new dim of size 1 may be the only key/value head: it stays whole, and every rank has it
    inner_after = math.prod(after[d] for d in new if d > target)
    if inner_after >= inner_before:  # divided: whole inner parts stay together
        by = inner_after // inner_before
        if any(edge % by for ranges in place.cuts for part in ranges for edge in part):
            _keep_together(walk, place, by)
        return place.scaled(target, by=by)
    times = inner_before // inner_after
    assert place.origin is not None
    if place.origin.unit % times:
        raise Conflict("a split dim is merged with one that its weight does not hold", place)
    return place.scaled(target, times=times)


def _keep_together(walk: Walk, place: Placement, by: int) -> None:
    def change(cutting: Cutting, origin: Origin) -> bool:
        start, stop = cutting.section_at(origin.offset)
        granule = math.lcm(cutting.granules.get(start, 1), by * origin.unit)
        if granule == cutting.granules.get(start, 1) or (stop - start) % granule:
            return False
        cutting.granules[start] = granule
        cutting.given.pop(start, None)
        return True

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
    if isinstance(new[result.dim], fx.Node):
        raise Conflict("a split dim has a size that is not a constant", place)
    if new[result.dim] != -1:
        walk.rewritten[node] = lambda build, rank: build.call(
            node.target, build.of(x), [*map(build.of, new[: result.dim]), total(result.cuts[rank]),
                                       *map(build.of, new[result.dim + 1 :])]
        )  # fmt: skip
    return result


def flatten(walk: Walk, node: fx.Node) -> Place:
    x = node.args[0]
    assert isinstance(x, fx.Node)
    place = walk.of(x, node)
    if place.kind == "split":
        return carried(walk, place, shape(x), shape(node))
    return same_if_partial(walk, node)


def expand(walk: Walk, node: fx.Node) -> Place:
    """Heads that are repeated, say: other dims than the split one grow."""
    x, sizes = node.args[0], node.args[1]
    assert isinstance(x, fx.Node) and isinstance(sizes, list | tuple)
    place = walk.of(x, node)
    if place.kind != "split":
        return same_if_partial(walk, node)
    result = place.moved(place.dim + len(sizes) - len(shape(x)))
    if shape(node)[result.dim] != shape(x)[place.dim] or isinstance(sizes[result.dim], fx.Node):
        raise Conflict("a split dim is repeated", place)
    if sizes[result.dim] != -1:
        walk.rewritten[node] = lambda build, rank: build.call(
            node.target, build.of(x), [*map(build.of, sizes[: result.dim]), -1, *map(build.of, sizes[result.dim + 1 :])]
        )
    return result


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
    if any(p.kind != "whole" and not p.same_as(place) for p in places) or (not new_dim and at == place.dim):
        raise Conflict("values are joined that are not split alike", *places)
    for part in parts:
        if walk.is_weight(part):
            walk.follow(part, place.dim, place, node)
        elif walk.live[part]:
            walk.need(node, part, place)
        else:
            walk.wants[node, part] = place
    return place.moved(place.dim + (new_dim and at <= place.dim))
