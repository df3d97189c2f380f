"""Rules of operators that only rearrange: reshapes, transpositions, joins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from phalanx.model.shard.cuts import total
from phalanx.model.shard.placement import PARTIAL, WHOLE, Conflict
from phalanx.model.shard.reshape import carried
from phalanx.model.shard.rules.common import otherwise, same_if_partial
from phalanx.model.shard.walk import Place, Rule, Walk, shape


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
    if any(not p.same_as(place) for p in places) or (not new_dim and at == place.dim):
        raise Conflict("values are joined that are not split alike", *places)
    return place.moved(place.dim + (new_dim and at <= place.dim))
