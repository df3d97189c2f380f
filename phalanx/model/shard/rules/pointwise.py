"""Rules of operators that work element by element or reduce dims, and of those that draw or normalise features."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, fx

from phalanx.model.shard.placement import PARTIAL, TOKENS, WHOLE, Conflict, Cutting, Origin, Placement, tiles
from phalanx.model.shard.rules.common import is_partial, only_ranges
from phalanx.model.shard.walk import Place, Walk, shape

aten, own = torch.ops.aten, torch.ops.phalanx


def pointwise(walk: Walk, node: fx.Node) -> Place:
    tensors = [a for a in node.all_input_nodes if walk.live[a]]
    places = {a: walk.of(a, node) for a in tensors}
    splits = {a: p for a, p in places.items() if p.kind == "split"}
    if splits:
        return _split_pointwise(walk, node, tensors, splits)
    for a in tensors:
        walk.need_home(node, a)
    homes = [walk.home(a) if places[a].kind == "partial" else places[a] for a in tensors if not walk.is_weight(a)]
    if not any(p.kind == "tokens" for p in homes):
        return WHOLE
    for a in node.all_input_nodes:
        if not isinstance(a.meta.get("val"), Tensor):
            continue
        if walk.live[a] and not walk.is_weight(a) and walk.setting.has_tokens(shape(a)):
            walk.need(node, a, TOKENS)
        elif len(shape(a)) >= 2 and shape(a)[-2] != 1:  # what no rank has only some tokens of
            return _whole_after_all(walk, node, tensors)
    return TOKENS


def _whole_after_all(walk: Walk, node: fx.Node, tensors: list[fx.Node]) -> Place:
    for a in tensors:
        walk.wants.pop((node, a), None)
        walk.need_whole(node, a)
    return WHOLE


def _split_pointwise(
    walk: Walk, node: fx.Node, tensors: list[fx.Node], splits: dict[fx.Node, Placement]
) -> Placement:  # fmt: skip
    rank = len(shape(node))
    first, place = leading(splits)
    dim = place.dim + rank - len(shape(first))
    for a, other in splits.items():
        own_dim = dim - (rank - len(shape(a)))
        meet(walk, place.moved(own_dim), other, own_dim >= 0 and shape(a)[own_dim] != 1)
    for a in tensors:
        if a in splits:
            continue
        own_dim = dim - (rank - len(shape(a)))
        spans = own_dim >= 0 and shape(a)[own_dim] != 1
        if walk.is_weight(a):
            if spans:
                walk.follow(a, own_dim, place, node)
        else:
            walk.need(node, a, place.moved(own_dim) if spans else WHOLE)
    for a in node.all_input_nodes:  # what is the same everywhere and spans the split dim is cut where it is used
        own_dim = dim - (rank - len(shape(a))) if isinstance(a.meta.get("val"), Tensor) else -1
        if not walk.live[a] and own_dim >= 0 and shape(a)[own_dim] != 1:
            walk.wants[node, a] = place.moved(own_dim)
    return place.moved(dim)


def leading(splits: Mapping[fx.Node, Placement]) -> tuple[fx.Node, Placement]:
    """The value that others follow: one of which ranks have different parts, if there is one."""
    return next((each for each in splits.items() if not each[1].is_everywhere), next(iter(splits.items())))


def meet(walk: Walk, place: Placement, other: Placement, spans: bool) -> None:
    """A split value meets another that lies like `place`. What every rank has all of may do so if it is the same for
    all indices of the split dim, that is, does not span it."""
    if other.is_everywhere and not spans:
        return
    if (other.dim, other.outer) != (place.dim, place.outer):
        raise Conflict("values split on different dims meet", place, other)
    if other.cuts != place.cuts:
        unify(walk, place, other)


def unify(walk: Walk, place: Placement, other: Placement) -> None:
    """Cuts the weight behind `other` as the one behind `place` is cut."""

    def change(cutting: Cutting, origin: Origin) -> bool:
        start, _ = cutting.section_at(origin.offset)
        ranges = [cuts[0] for cuts in place.cuts if len(cuts) == 1]
        wanted = tuple((origin.element(a), origin.element(b)) for a, b in ranges)
        if len(ranges) != len(place.cuts) or cutting.given.get(start) == wanted:
            return False
        cutting.given[start] = wanted
        return True

    walk.refine(other, change)


def linear_pointwise(walk: Walk, node: fx.Node) -> Place:
    """Sums, differences and negations of summands are summands."""
    tensors = node.all_input_nodes
    if tensors and all(is_partial(walk, a, node) for a in tensors) and not _adds_number(node):
        return PARTIAL
    return pointwise(walk, node)


def _adds_number(node: fx.Node) -> bool:
    """Whether a number is added, which must happen once and not on every rank."""
    return len(node.all_input_nodes) == 1 and len(node.args) > 1


def scaling(walk: Walk, node: fx.Node) -> Place:
    """A summand times something whole is a summand."""
    x, y = node.args[0], node.args[1]
    partial = [a for a in (x, y) if isinstance(a, fx.Node) and is_partial(walk, a, node)]
    if len(partial) != 1 or (partial[0] is y and node.target is not aten.mul.Tensor):
        return pointwise(walk, node)
    other = y if partial[0] is x else x
    if isinstance(other, fx.Node) and walk.live[other]:
        if walk.is_weight(other) or walk.of(other, node).kind not in ("whole", "tokens") or _is_home(walk, partial[0]):
            return pointwise(walk, node)
        walk.need_whole(node, other)
    return PARTIAL


def _is_home(walk: Walk, value: fx.Node) -> bool:
    """Whether a sum could be taken right here, at the size of the activations between units."""
    return walk.setting.has_tokens(shape(value))


def dropout(walk: Walk, node: fx.Node) -> Place:
    x, keys, p = node.args[:3]
    assert isinstance(x, fx.Node)
    start = node.args[5] if len(node.args) > 5 else None  # where a slice begins
    place = walk.need_home(node, x)
    if place.kind == "tokens":
        walk.rewritten[node] = lambda build, rank: build.call(
            own.dropout_part.default, build.of(x), build.of(keys), p, rank, 0, build.of(start)
        )
    if place.kind == "split":
        if place.dim != len(shape(x)) - 1:
            raise Conflict("dropout of a value that is split on another dim than its features", place)
        only_ranges(place)
        walk.rewritten[node] = lambda build, rank: build.call(
            own.dropout_part.default, build.of(x), build.of(keys), p, 0, place.cuts[rank][0][0], build.of(start)
        )
    return place


def layer_norm(walk: Walk, node: fx.Node) -> Place:
    x, normalised = node.args[0], node.args[1]
    assert isinstance(x, fx.Node)
    place = walk.need_home(node, x)
    first = len(shape(x)) - len(normalised)  # pyright: ignore
    if place.kind in ("split", "tokens") and place.dim >= first:
        raise Conflict("a norm over a split dim", place)
    return place


def along_dim(walk: Walk, node: fx.Node) -> Place:
    """A softmax or a running sum: of each row along a dim by itself."""
    x, dim = node.args[0], int(node.args[1])  # pyright: ignore
    assert isinstance(x, fx.Node)
    place = walk.need_home(node, x)
    if place.kind == "split" and place.dim == dim % len(shape(x)):
        raise Conflict(f"{node.target} along a split dim", place)
    if place.kind == "tokens" and place.dim == dim % len(shape(x)):
        walk.need_whole(node, x)
        return WHOLE
    return place


def extreme(walk: Walk, node: fx.Node) -> Place:
    """The largest or smallest along dims, perhaps with its index; of a sum only once it is taken."""
    place = _without_dims(walk, node, 1)
    return place if isinstance(node.meta["val"], Tensor) else (place,) * len(node.meta["val"])


def vector_norm(walk: Walk, node: fx.Node) -> Place:
    return _without_dims(walk, node, 2)


def _without_dims(walk: Walk, node: fx.Node, first: int) -> Placement:
    """What makes one number of each row along dims. Argument `first` names the dims, the next one whether they stay."""
    x = node.args[0]
    assert isinstance(x, fx.Node)
    place, rank = walk.need_home(node, x), len(shape(x))
    given, keeps = (*node.args[first : first + 2], *(None, False)[len(node.args) - first :])
    given = list(range(rank)) if given in (None, []) else given
    dims = [int(d) % rank for d in (given if isinstance(given, list | tuple) else [given])]  # pyright: ignore
    if place.kind != "split":
        walk.need_whole(node, x)
        return WHOLE
    if place.dim in dims:
        raise Conflict(f"{node.target} along a split dim", place)
    return place if keeps else place.moved(place.dim - sum(d < place.dim for d in dims))


def _of_all_ranks(walk: Walk, node: fx.Node, place: Placement, dims: list[int], keeps: bool) -> Place:
    """A sum or mean over the split dim, as norms over all heads need it: of each rank's part, a summand. Not of values
    that other activations have been added to: those are better summed before, as they are wherever they are used."""
    x = node.args[0]
    assert isinstance(x, fx.Node) and place.origin is not None
    if node.kwargs or len(node.args) > 3 or not tiles(place.cuts) or not _comes_from(walk, x, place.origin.product):
        raise Conflict("a reduction over a split dim", place)
    if node.target is aten.mean.dim:
        count = math.prod(shape(x)[dim] for dim in dims)
        walk.rewritten[node] = lambda build, rank: build.call(
            aten.div.Tensor, build.call(aten.sum.dim_IntList, build.of(x), dims, keeps), count
        )
    return PARTIAL


def _comes_from(walk: Walk, value: fx.Node, product: fx.Node) -> bool:
    """Whether a value is made of one product and weights alone."""
    if value is product or not walk.live[value] or walk.is_weight(value):
        return True
    return value.op != "placeholder" and all(_comes_from(walk, source, product) for source in value.all_input_nodes)


def reduction(walk: Walk, node: fx.Node) -> Place:
    """A sum or mean over dims."""
    x = node.args[0]
    assert isinstance(x, fx.Node)
    place = walk.of(x, node)
    rank = len(shape(x))
    dims = sorted(int(d) % rank for d in node.args[1]) if len(node.args) > 1 and node.args[1] else list(range(rank))  # pyright: ignore
    keeps = len(node.args) > 2 and bool(node.args[2])
    if place.kind in ("partial", "whole"):
        return place
    if place.kind == "tokens":
        if 1 in dims or 0 in dims or not keeps:
            walk.need_whole(node, x)
            return WHOLE
        return place
    if place.dim in dims:
        return _of_all_ranks(walk, node, place, dims, keeps)
    return place if keeps else place.moved(place.dim - sum(d < place.dim for d in dims))
