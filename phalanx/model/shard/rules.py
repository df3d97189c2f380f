"""What each operator does to a split: one rule per operator, from how its arguments lie to how its result does.

A rule says which placements it needs, how its result lies, and which literals change on a rank (head counts in views,
bounds of slices). An operator without a rule gets whole arguments and gives a whole result, which is always right.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

import phalanx.model.ops.attention
import phalanx.model.ops.experts
import phalanx.model.ops.operators  # noqa: F401  (define the operators named below)
from phalanx.model.shard.canonical import loss_join, loss_part
from phalanx.model.shard.cuts import Cutting, Range, TooFew, cut_heads, tiles, total
from phalanx.model.shard.placement import PARTIAL, STACKED, TOKENS, WHOLE, Conflict, Origin, Placement
from phalanx.model.shard.reshape import carried
from phalanx.model.shard.walk import Place, Rule, Walk, shape

aten, own = torch.ops.aten, torch.ops.phalanx


class TooFewHeads(Exception):
    """An attention has fewer heads than ranks that would divide them."""

    def __init__(self, heads: int, ranks: int) -> None:
        super().__init__(f"{heads} heads, {ranks} ranks")
        self.heads, self.ranks = heads, ranks


def otherwise(walk: Walk, node: fx.Node) -> Place:
    for source in node.all_input_nodes:
        if walk.live[source] and not walk.is_weight(source):
            if isinstance(walk.places[source], tuple):
                raise Conflict(f"no rule for {node.target}", *_parts(walk.places[source]))
            walk.need_whole(node, source)
    value = node.meta.get("val")
    return WHOLE if isinstance(value, Tensor) else tuple(WHOLE for _ in value or ())


def _parts(place: Any) -> list[Placement]:
    return [place] if isinstance(place, Placement) else [part for item in place for part in _parts(item)]


# Products.


def _linear(walk: Walk, node: fx.Node, out_dim: int = 0, in_dim: int = 1) -> Place:
    """x @ weight over x's last dim; the weight's dims are named by the caller."""
    x, weight = node.args[0], node.args[1]
    assert isinstance(x, fx.Node) and isinstance(weight, fx.Node)
    place, last = walk.need_home(node, x), len(shape(x)) - 1
    if not walk.is_weight(weight):
        return otherwise(walk, node)
    if place.kind == "split":
        if place.dim != last:
            return place  # every rank has other rows, and all of the weight
        if not tiles(place.cuts):
            raise Conflict("ranks have the same part of what is summed", place)
        walk.follow(weight, in_dim, place, node)
        return PARTIAL
    if walk.is_done_whole(node):
        return place if place.kind == "tokens" else WHOLE
    split = walk.cut_weight(weight, out_dim, node).moved(len(shape(node)) - 1)
    walk.need_whole(node, x)
    return split


def _matmul(walk: Walk, node: fx.Node) -> Place:
    return _linear(walk, node, out_dim=1, in_dim=0)


def _grouped(walk: Walk, node: fx.Node) -> Place:
    walk.need_whole(node, node.args[2])
    return _linear(walk, node, out_dim=2, in_dim=1)


def _embedding(walk: Walk, node: fx.Node) -> Place:
    weight = node.args[0]
    assert isinstance(weight, fx.Node)
    rows, columns = shape(weight)
    if node.meta["unit"] or rows <= columns or walk.is_done_whole(node) or walk.live[node.args[1]]:  # pyright: ignore
        return otherwise(walk, node)
    split = walk.cut_weight(weight, 0, node)
    padding = node.args[2] if len(node.args) > 2 else -1
    _only_ranges(split)
    walk.rewritten[node] = lambda build, rank: build.call(
        own.embedding_part.default, build.of(weight), build.of(node.args[1]), split.cuts[rank][0][0], padding
    )
    return PARTIAL


# Values that are computed element by element.


def _pointwise(walk: Walk, node: fx.Node) -> Place:
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
    for a in tensors:
        if not walk.is_weight(a) and walk.setting.has_tokens(shape(a)):
            walk.need(node, a, TOKENS)
        elif len(shape(a)) >= 2 and shape(a)[-2] != 1 and not walk.setting.has_tokens(shape(a)):
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
    aligned = {a: p.dim + rank - len(shape(a)) for a, p in splits.items()}
    first, place = next(iter(splits.items()))
    dim = aligned[first]
    for a, other in splits.items():
        if aligned[a] != dim:
            raise Conflict("values split on different dims meet", place, other)
        if other.cuts != place.cuts:
            _unify(walk, place, other)
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


def _unify(walk: Walk, place: Placement, other: Placement) -> None:
    """Cuts the weight behind `other` as the one behind `place` is cut."""

    def change(cutting: Cutting, origin: Origin) -> bool:
        start, _ = cutting.section_at(origin.offset)
        ranges = [cuts[0] for cuts in place.cuts if len(cuts) == 1]
        wanted = tuple((origin.offset + a * origin.unit, origin.offset + b * origin.unit) for a, b in ranges)
        if len(ranges) != len(place.cuts) or cutting.given.get(start) == wanted:
            return False
        cutting.given[start] = wanted
        return True

    walk.refine(other, change)


def _linear_pointwise(walk: Walk, node: fx.Node) -> Place:
    """Sums, differences and negations of summands are summands."""
    tensors = node.all_input_nodes
    if tensors and all(_is_partial(walk, a, node) for a in tensors) and not _adds_number(node):
        return PARTIAL
    return _pointwise(walk, node)


def _adds_number(node: fx.Node) -> bool:
    """Whether a number is added, which must happen once and not on every rank."""
    return len(node.all_input_nodes) == 1 and len(node.args) > 1


def _scaling(walk: Walk, node: fx.Node) -> Place:
    """A summand times something whole is a summand."""
    x, y = node.args[0], node.args[1]
    partial = [a for a in (x, y) if isinstance(a, fx.Node) and _is_partial(walk, a, node)]
    if len(partial) != 1 or (partial[0] is y and node.target is not aten.mul.Tensor):
        return _pointwise(walk, node)
    other = y if partial[0] is x else x
    if isinstance(other, fx.Node) and walk.live[other]:
        if walk.is_weight(other) or walk.of(other, node).kind not in ("whole", "tokens") or _is_home(walk, partial[0]):
            return _pointwise(walk, node)
        walk.need_whole(node, other)
    return PARTIAL


def _is_home(walk: Walk, value: fx.Node) -> bool:
    """Whether a sum could be taken right here, at the size of the activations between units."""
    return walk.setting.has_tokens(shape(value))


def _is_partial(walk: Walk, value: fx.Node, user: fx.Node) -> bool:
    return walk.live[value] and not walk.is_weight(value) and walk.of(value, user).kind == "partial"


def _dropout(walk: Walk, node: fx.Node) -> Place:
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
        _only_ranges(place)
        walk.rewritten[node] = lambda build, rank: build.call(
            own.dropout_part.default, build.of(x), build.of(keys), p, 0, place.cuts[rank][0][0], build.of(start)
        )
    return place


def _only_ranges(place: Placement) -> None:
    if any(len(ranges) != 1 for ranges in place.cuts) or not tiles(place.cuts):
        raise Conflict("a split into several ranges cannot be numbered", place)


def _layer_norm(walk: Walk, node: fx.Node) -> Place:
    x, normalised = node.args[0], node.args[1]
    assert isinstance(x, fx.Node)
    place = walk.need_home(node, x)
    first = len(shape(x)) - len(normalised)  # pyright: ignore
    if place.kind in ("split", "tokens") and place.dim >= first:
        raise Conflict("a norm over a split dim", place)
    return place


def _reduction(walk: Walk, node: fx.Node) -> Place:
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
        raise Conflict("a reduction over a split dim", place)
    return place if keeps else place.moved(place.dim - sum(d < place.dim for d in dims))


# Views.


def _reshape(walk: Walk, node: fx.Node) -> Place:
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


def _flatten(walk: Walk, node: fx.Node) -> Place:
    x = node.args[0]
    assert isinstance(x, fx.Node)
    place = walk.of(x, node)
    if place.kind == "split":
        return carried(walk, place, shape(x), shape(node))
    return _same_if_partial(walk, node)


def _same_if_partial(walk: Walk, node: fx.Node) -> Place:
    x = node.args[0]
    assert isinstance(x, fx.Node)
    if _is_partial(walk, x, node):
        return PARTIAL
    walk.need_whole(node, x)
    return WHOLE


def _dims_moved(move: Callable[[fx.Node, int, int], int]) -> Rule:
    """A rule for views that only renumber dims."""

    def rule(walk: Walk, node: fx.Node) -> Place:
        x = node.args[0]
        assert isinstance(x, fx.Node)
        if walk.is_weight(x):
            return WHOLE
        place = walk.of(x, node)
        if place.kind == "split":
            return place.moved(move(node, place.dim, len(shape(x))))
        return _same_if_partial(walk, node)

    return rule


def _transposed(node: fx.Node, dim: int, rank: int) -> int:
    a, b = (int(d) % rank for d in node.args[1:3])  # pyright: ignore
    return {a: b, b: a}.get(dim, dim)


def _permuted(node: fx.Node, dim: int, rank: int) -> int:
    return [int(d) % rank for d in node.args[1]].index(dim)  # pyright: ignore


def _unsqueezed(node: fx.Node, dim: int, rank: int) -> int:
    at = int(node.args[1]) % (rank + 1)  # pyright: ignore
    return dim + (at <= dim)


def _squeezed(node: fx.Node, dim: int, rank: int) -> int:
    at = int(node.args[1]) % rank  # pyright: ignore
    return dim - (at < dim)


def _cat(walk: Walk, node: fx.Node) -> Place:
    return _joined(walk, node, new_dim=False)


def _stack(walk: Walk, node: fx.Node) -> Place:
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


# Parts.


def _sections(walk: Walk, node: fx.Node) -> Place:
    """split and chunk: along the split dim they give the sections of a fused weight."""
    x = node.args[0]
    assert isinstance(x, fx.Node)
    place, rank = walk.of(x, node), len(shape(x))
    at = int(node.args[2] if len(node.args) > 2 else 0) % rank  # pyright: ignore
    items: Any = node.meta["val"]
    if place.kind == "partial":
        return tuple(PARTIAL for _ in items)
    if place.kind != "split":
        walk.need_whole(node, x)
        return tuple(WHOLE for _ in items)
    if at != place.dim:
        return tuple(place for _ in items)
    found, start = [], 0
    for item in items:
        found.append(_section(walk, place, (start, start + item.shape[at])))
        start += item.shape[at]
    return tuple(found)


def _section(walk: Walk, place: Placement, wanted: Range) -> Placement:
    """The part of a split value that lies in a range of the split dim; every rank must have its share of it."""
    start, stop = wanted
    cuts = []
    for ranges in place.cuts:
        inside = tuple((max(a, start) - start, min(b, stop) - start) for a, b in ranges if a < stop and b > start)
        crosses = any(a < start < b or a < stop < b for a, b in ranges)
        if crosses or not inside:
            _cut_at(walk, place, wanted)
        cuts.append(inside)
    assert place.origin is not None
    origin = Origin(
        place.origin.product, place.origin.weight, place.origin.offset + start * place.origin.unit, place.origin.unit
    )
    return Placement("split", place.dim, tuple(cuts), origin)


def _cut_at(walk: Walk, place: Placement, wanted: Range) -> None:
    """Makes a range a section of the weight."""

    def change(cutting: Cutting, origin: Origin) -> bool:
        edges = {origin.offset + edge * origin.unit for edge in wanted} - {0, cutting.size}
        if edges <= cutting.bounds:
            return False
        cutting.bounds |= edges
        cutting.given.clear()
        return True

    walk.refine(place, change)


def _item(walk: Walk, node: fx.Node) -> Place:
    source, index = node.args
    assert isinstance(source, fx.Node) and isinstance(index, int)
    place = walk.places[source][index]
    parent = source.args[0]
    if source.target in (aten.split.Tensor, aten.chunk.default) and place.kind == "split":
        assert isinstance(parent, fx.Node)
        whole = walk.of(parent, source)
        at = int(source.args[2] if len(source.args) > 2 else 0) % len(shape(parent))  # pyright: ignore
        if at == whole.dim:
            start = sum(item.shape[at] for item in source.meta["val"][:index])
            _slice_locally(walk, node, parent, whole, (start, start + shape(node)[at]))
    return place


def _slice_locally(walk: Walk, node: fx.Node, x: fx.Node, place: Placement, wanted: Range) -> None:
    start, stop = wanted

    def built(build: Any, rank: int) -> Any:
        before = sum(min(b, start) - a for a, b in place.cuts[rank] if a < start)
        inside = sum(min(b, stop) - max(a, start) for a, b in place.cuts[rank] if a < stop and b > start)
        return build.call(aten.slice.Tensor, build.of(x), place.dim, before, before + inside)

    walk.rewritten[node] = built


def _slice(walk: Walk, node: fx.Node) -> Place:
    x = node.args[0]
    assert isinstance(x, fx.Node)
    place = walk.of(x, node)
    if place.kind != "split":
        return _same_if_partial(walk, node)
    dim, start, stop, step = _bounds(node, shape(x))
    if dim != place.dim:
        return place
    if step != 1 or not isinstance(start, int) or not isinstance(stop, int):
        raise Conflict("a slice of a split dim with a step", place)
    part = _section(walk, place, (start, stop))
    _slice_locally(walk, node, x, place, (start, stop))
    return part


def _bounds(node: fx.Node, size: torch.Size) -> tuple[int, Any, Any, Any]:
    _, dim, start, stop, step = (*node.args, *(0, None, None, 1)[len(node.args) - 1 :])
    dim = int(dim) % len(size)  # pyright: ignore
    start, stop = 0 if start is None else start, size[dim] if stop is None else stop
    if isinstance(start, int) and isinstance(stop, int):
        start, stop = (edge + size[dim] if edge < 0 else min(edge, size[dim]) for edge in (start, stop))
    return dim, start, stop, step


def _select(walk: Walk, node: fx.Node) -> Place:
    x = node.args[0]
    assert isinstance(x, fx.Node)
    place = walk.of(x, node)
    dim = int(node.args[1]) % len(shape(x))  # pyright: ignore
    if place.kind == "split":
        if dim == place.dim:
            raise Conflict("one index of a split dim", place)
        return place.moved(place.dim - (dim < place.dim))
    return _same_if_partial(walk, node)


def _index(walk: Walk, node: fx.Node) -> Place:
    """Rows picked by one index tensor, as mixtures of experts do."""
    x, indices = node.args
    assert isinstance(x, fx.Node)
    place = walk.of(x, node)
    simple = isinstance(indices, list | tuple) and len(indices) == 1
    if place.kind == "partial" and simple:
        walk.need_whole(node, indices[0])  # pyright: ignore
        return PARTIAL
    if place.kind == "split" and simple and place.dim > 0 and len(shape(indices[0])) == 1:  # pyright: ignore
        walk.need_whole(node, indices[0])  # pyright: ignore
        return place
    return otherwise(walk, node)


# Attention and loss.


def _attention(walk: Walk, node: fx.Node) -> Place:
    """Of whole sequences, or of slices, which have a handle after q, k and v."""
    q, k, v = node.args[:3]
    assert isinstance(q, fx.Node) and isinstance(k, fx.Node) and isinstance(v, fx.Node)
    masks = 4 if node.target is own.attention_slice.default else 3  # where what may see what begins
    places = [walk.of(x, node) for x in (q, k, v)]
    if not any(p.kind == "split" for p in places):
        return otherwise(walk, node)
    if any(p.kind != "split" or p.dim != 1 for p in places):
        raise Conflict("queries, keys and values are not all split by heads", *places)
    degree, heads, kv_heads = walk.degree(node), shape(q)[1], shape(k)[1]
    try:
        of_q, of_kv = cut_heads(heads, kv_heads, degree)
    except TooFew as reason:
        if walk.setting.allow_whole:
            raise Conflict(str(reason), *places) from None
        raise TooFewHeads(heads, degree) from None
    for place, wanted in zip(places, (of_q, of_kv, of_kv), strict=True):
        if place.cuts != tuple((part,) for part in wanted):
            _give(walk, place, wanted)
    bias = node.args[masks + 2]
    if isinstance(bias, fx.Node):
        spans = shape(bias)[1] != 1
        if walk.live[bias]:
            walk.need(node, bias, places[0] if spans else WHOLE)
        elif spans:
            walk.wants[node, bias] = places[0]
    for other in (*node.args[masks : masks + 2], node.args[masks + 3]):
        if isinstance(other, fx.Node) and walk.live[other]:
            walk.need_whole(node, other)
    dropout = masks + 8
    if node.args[dropout]:
        walk.rewritten[node] = lambda build, rank: build.call(
            node.target, *map(build.of, node.args[: dropout + 1]), places[0].cuts[rank][0][0],
            *map(build.of, node.args[dropout + 2 :]),
        )  # fmt: skip
    return (places[0], places[0])


def _give(walk: Walk, place: Placement, wanted: tuple[Range, ...]) -> None:
    """Lays down which heads each rank has."""

    def change(cutting: Cutting, origin: Origin) -> bool:
        ranges = tuple((origin.offset + a * origin.unit, origin.offset + b * origin.unit) for a, b in wanted)
        section = cutting.section_at(origin.offset)
        if section != (origin.offset, origin.offset + _extent(wanted) * origin.unit) or cutting.given.get(
            section[0]
        ) == ranges:  # fmt: skip
            return False
        cutting.given[section[0]] = ranges
        return True

    walk.refine(place, change)


def _extent(ranges: tuple[Range, ...]) -> int:
    return max(stop for _, stop in ranges)


def _loss_part(walk: Walk, node: fx.Node) -> Place:
    """The statistics of one rank's logits."""
    logits, targets, ignore, smoothing = node.args
    assert isinstance(logits, fx.Node)
    place = walk.need_home(node, logits)
    if place.kind != "split":
        walk.need_whole(node, logits)
        return WHOLE
    if place.dim != len(shape(logits)) - 1:
        raise Conflict("a loss of logits that are not split by classes", place)
    _only_ranges(place)
    walk.rewritten[node] = lambda build, rank: build.call(
        own.cross_entropy_part.default, build.of(logits), build.of(targets), place.cuts[rank][0][0], ignore, smoothing
    )
    return STACKED


def _loss_join(walk: Walk, node: fx.Node) -> Place:
    part, logits, targets, ignore, smoothing = node.args
    assert isinstance(part, fx.Node) and isinstance(logits, fx.Node)
    classes = shape(logits)[-1]
    if walk.of(part, node).kind == "stacked":
        walk.wants[node, part] = WHOLE
        walk.rewritten[node] = lambda build, rank: build.call(
            own.cross_entropy_join.default, build.of(part), build.of(targets), ignore, smoothing, classes
        )
    else:
        walk.need_whole(node, logits)
        walk.rewritten[node] = lambda build, rank: build.call(
            own.cross_entropy_sum.default, build.of(logits), build.of(targets), ignore, smoothing
        )
    return WHOLE


def _table() -> dict[Any, Rule]:
    pointwise = (
        aten.tanh.default, aten.gelu.default, aten.silu.default, aten.relu.default, aten.pow.Tensor_Scalar,
        aten.rsqrt.default, aten.sqrt.default, aten.exp.default, aten.sigmoid.default, aten.to.dtype,
        aten.type_as.default, aten.where.self, aten.clamp.default, aten.abs.default, aten.square.default,
        aten.reciprocal.default, aten.leaky_relu.default, aten.softplus.default, aten.pow.Tensor_Tensor,
    )  # fmt: skip
    rules: dict[Any, Rule] = dict.fromkeys(pointwise, _pointwise)
    rules |= dict.fromkeys((aten.add.Tensor, aten.sub.Tensor, aten.neg.default), _linear_pointwise)
    rules |= dict.fromkeys((aten.mul.Tensor, aten.div.Tensor), _scaling)
    rules |= dict.fromkeys((aten.sum.dim_IntList, aten.mean.dim), _reduction)
    rules |= dict.fromkeys((aten.split.Tensor, aten.chunk.default), _sections)
    return rules | {
        aten.linear.default: _linear, aten.mm.default: _matmul, aten.matmul.default: _matmul,
        own.grouped_matmul.default: _grouped, aten.embedding.default: _embedding, own.dropout.default: _dropout,
        own.dropout_part.default: _dropout,
        aten.layer_norm.default: _layer_norm, aten.reshape.default: _reshape, aten.flatten.using_ints: _flatten,
        aten.contiguous.default: _dims_moved(lambda node, dim, rank: dim),
        aten.transpose.int: _dims_moved(_transposed), aten.permute.default: _dims_moved(_permuted),
        aten.unsqueeze.default: _dims_moved(_unsqueezed), aten.squeeze.dim: _dims_moved(_squeezed),
        aten.cat.default: _cat, aten.stack.default: _stack, aten.slice.Tensor: _slice, aten.select.int: _select,
        aten.index.Tensor: _index, own.attention.default: _attention,
        own.attention_slice.default: _attention, loss_part: _loss_part, loss_join: _loss_join,
        operator.getitem: _item,
    }  # fmt: skip


RULES = _table()
