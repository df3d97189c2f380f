"""Rules of operators where splits begin and end: products with weights (by columns, by rows, by vocabulary), attention,
which is split by heads, and the loss and outputs that leave, which are split by classes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import fx

from phalanx.model.shard.placement import (
    PARTIAL,
    STACKED,
    WHOLE,
    Conflict,
    Cutting,
    Origin,
    Placement,
    Range,
    cut_heads,
    tiles,
)
from phalanx.model.shard.rules.common import not_repeated, only_ranges, otherwise
from phalanx.model.shard.rules.pointwise import leading, meet
from phalanx.model.shard.rules.sections import cut_at
from phalanx.model.shard.rules.views import keep_together
from phalanx.model.shard.walk import Place, Walk, shape

aten, own = torch.ops.aten, torch.ops.phalanx
_WITH_WEIGHTS = (
    aten.linear.default, aten.mm.default, aten.matmul.default, aten.bmm.default, own.grouped_matmul.default,
)  # fmt: skip


def linear(walk: Walk, node: fx.Node, out_dim: int = 0, in_dim: int = 1) -> Place:
    """x @ weight over x's last dim; the weight's dims are named by the caller."""
    x, weight = node.args[0], node.args[1]
    assert isinstance(x, fx.Node) and isinstance(weight, fx.Node)
    if not walk.is_weight(weight):
        return of_values(walk, node)
    place, last = walk.need_home(node, x), len(shape(x)) - 1
    if place.kind == "split":
        if place.dim != last:
            return _of_rows(walk, node, place)
        not_repeated(place)
        if not tiles(place.cuts):
            raise Conflict("ranks have the same part of what is summed", place)
        walk.follow(weight, in_dim, place, node)
        return PARTIAL
    if walk.is_done_whole(node):
        return place if place.kind == "tokens" else WHOLE
    split = walk.cut_weight(weight, out_dim, node).moved(len(shape(node)) - 1)
    walk.need_whole(node, x)
    return split


def _of_rows(walk: Walk, node: fx.Node, place: Placement) -> Place:
    """Every rank has other rows, and all of the weight; of a batch of weights (experts) those that its rows meet."""
    weight = node.args[1]
    assert isinstance(weight, fx.Node)
    own_dim = place.dim - (len(shape(node)) - len(shape(weight)))
    if len(shape(weight)) > 2 and own_dim >= 0 and shape(weight)[own_dim] != 1:
        not_repeated(place)
        walk.follow(weight, own_dim, place, node)
    return place


def of_values(walk: Walk, node: fx.Node) -> Place:
    """A product of two values, both with a dim that it leaves alone, such as heads: ranks may have parts of that. What
    is added to it, if anything, is its first argument."""
    values = [value for value in node.args if isinstance(value, fx.Node)]
    splits = {value: place for value in values if (place := walk.of(value, node)).kind == "split"}
    if not splits:
        return otherwise(walk, node)
    rank = len(shape(node))
    dims = {value: place.dim + rank - len(shape(value)) for value, place in splits.items()}
    first, place = leading(splits)
    if dims[first] >= rank - 2:
        raise Conflict("a product of two values over a split dim", *splits.values())
    for value in values:
        own_dim = dims[first] - (rank - len(shape(value)))
        spans = own_dim >= 0 and shape(value)[own_dim] != 1
        if value in splits:
            meet(walk, place.moved(own_dim), splits[value], spans)
        elif walk.is_weight(value) and spans:
            walk.follow(value, own_dim, place, node)
        elif not walk.live[value] and spans:
            walk.wants[node, value] = place.moved(own_dim)
        else:
            walk.need(node, value, place.moved(own_dim) if spans else WHOLE)
    return place.moved(dims[first])


def matmul(walk: Walk, node: fx.Node) -> Place:
    weight = node.args[1]
    assert isinstance(weight, fx.Node)
    batch = len(shape(weight)) - 2
    return linear(walk, node, out_dim=batch + 1, in_dim=batch)


def grouped(walk: Walk, node: fx.Node) -> Place:
    x, _, offsets = node.args
    walk.need_whole(node, offsets)
    if (place := walk.of(x, node)).kind == "split" and place.dim == 0:
        raise Conflict("rows of experts are split", place)
    return linear(walk, node, out_dim=2, in_dim=1)


def embedding(walk: Walk, node: fx.Node) -> Place:
    weight = node.args[0]
    assert isinstance(weight, fx.Node)
    rows, columns = shape(weight)
    if node.meta["unit"] or rows <= columns or walk.is_done_whole(node) or walk.live[node.args[1]]:  # pyright: ignore
        return otherwise(walk, node)
    split = walk.cut_weight(weight, 0, node)
    padding = node.args[2] if len(node.args) > 2 else -1
    only_ranges(split)
    walk.rewritten[node] = lambda build, rank: build.call(
        own.embedding_part.default, build.of(weight), build.of(node.args[1]), split.cuts[rank][0][0], padding
    )
    return PARTIAL


class TooFewHeads(Exception):
    """An attention has fewer heads than ranks that would divide them."""

    def __init__(self, heads: int, ranks: int) -> None:
        super().__init__(f"{heads} heads, {ranks} ranks")
        self.heads, self.ranks = heads, ranks


def attention(walk: Walk, node: fx.Node) -> Place:
    """Of whole sequences, or of slices, which have a handle after q, k and v."""
    q, k, v = node.args[:3]
    assert isinstance(q, fx.Node) and isinstance(k, fx.Node) and isinstance(v, fx.Node)
    masks = 4 if node.target is own.attention_slice.default else 3  # where what may see what begins
    degree, heads, kv_heads = walk.degree(node), shape(q)[1], shape(k)[1]
    places = [walk.of(q, node), *(_only_head(walk, x, node) if kv_heads == 1 else walk.of(x, node) for x in (k, v))]
    dealt_out = [] if places[0].kind == "split" else [*_ended(walk, q, products=False)]
    if not any(p.kind == "split" for p in (*places, *dealt_out)):
        return otherwise(walk, node)
    if heads < degree:
        if not walk.setting.allow_whole:
            raise TooFewHeads(heads, degree)
        raise Conflict(f"{heads} heads cannot be divided between {degree} ranks", *places, *dealt_out)
    ended = [end for x, p in zip((q, k, v), places, strict=True) if p.kind != "split" for end in _ended(walk, x)]
    if ended or places[0].kind != "split" or any(p.kind == "split" and (p.dim, p.outer) != (1, 1) for p in places):
        raise Conflict("queries, keys and values are not all split by heads", *(ended or places))
    if not _lie_alike(walk, places):
        of_q, of_kv = cut_heads(heads, kv_heads, degree)
        for x, place, wanted in zip((q, k, v), places, (of_q, of_kv, of_kv), strict=True):
            cuts = tuple((part,) for part in wanted)
            if place.kind != "split":  # keys and values that every rank has
                walk.need(node, x, Placement("split", 1, cuts))
            elif place.cuts != cuts:
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
        only_ranges(places[0])
        walk.rewritten[node] = lambda build, rank: build.call(
            node.target, *map(build.of, node.args[: dropout + 1]), places[0].cuts[rank][0][0],
            *map(build.of, node.args[dropout + 2 :]),
        )  # fmt: skip
    return (places[0], places[0])


def _lie_alike(walk: Walk, places: Sequence[Placement]) -> bool:
    """Whether keys or values have several ranges of heads on each rank, as repeated ones do. The others are then cut at
    the same places, in sections."""
    given = next((p for p in places if p.origin is not None and p.origin.joined), None)
    if given is None:
        return False
    starts = [start for start, _ in given.cuts[0]]
    for place in places:
        if place.kind != "split" or len(place.cuts[0]) > len(starts):
            raise Conflict("queries, keys and values are not all split by heads", *places)
        if place.cuts != given.cuts:
            cut_at(walk, place, starts)
    return True


def _only_head(walk: Walk, value: fx.Node, user: fx.Node) -> Placement:
    """Keys or values of one head: its features, where ranks would have some of them, stay together."""
    place, head_dim = walk.of(value, user), len(shape(value)) - 1
    if place.kind != "split" or place.dim != head_dim:
        return place
    if not place.is_everywhere:
        keep_together(walk, place, shape(value)[head_dim])
    return replace(place, dim=1, cuts=(((0, 1),),) * len(place.cuts))


def _ended(walk: Walk, value: fx.Node, products: bool = True) -> Iterator[Placement]:
    """The splits that ended in the product that a value comes from: without them, that product could begin one. With
    products=False also those that ended on the way from it, in sections of which not every rank has a part."""
    if value.op != "call_function" or not walk.live[value] or walk.is_weight(value):
        return
    places = [walk.places[source] for source in value.all_input_nodes]
    splits = [place for place in places if isinstance(place, Placement) and place.kind == "split"]
    is_product = value.target in _WITH_WEIGHTS
    if splits and (is_product or not products):
        yield from splits
    if not splits and not is_product:
        for source in value.all_input_nodes:
            yield from _ended(walk, source, products)


def _give(walk: Walk, place: Placement, wanted: tuple[Range, ...]) -> None:
    """Lays down which heads each rank has."""

    def change(cutting: Cutting, origin: Origin) -> bool:
        ranges = tuple((origin.element(a), origin.element(b)) for a, b in wanted)
        section = cutting.section_at(origin.offset)
        if section != (origin.offset, origin.element(_extent(wanted))) or cutting.given.get(
            section[0]
        ) == ranges:  # fmt: skip
            return False
        cutting.given[section[0]] = ranges
        return True

    walk.refine(place, change)


def _extent(ranges: tuple[Range, ...]) -> int:
    return max(stop for _, stop in ranges)


def loss_part(walk: Walk, node: fx.Node) -> Place:
    """The statistics of one rank's logits."""
    logits, targets, ignore, smoothing = node.args
    assert isinstance(logits, fx.Node)
    place = walk.need_home(node, logits)
    if place.kind != "split":
        walk.need_whole(node, logits)
        return WHOLE
    if place.dim != len(shape(logits)) - 1:
        raise Conflict("a loss of logits that are not split by classes", place)
    only_ranges(place)
    walk.rewritten[node] = lambda build, rank: build.call(
        own.cross_entropy_part.default, build.of(logits), build.of(targets), place.cuts[rank][0][0], ignore, smoothing
    )
    return STACKED


def loss_join(walk: Walk, node: fx.Node) -> Place:
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


def leave(walk: Walk, node: fx.Node) -> Place:
    """An output that leaves in parts: each rank's is a summand of the output and of what stands for its loss."""
    output, rows, number = node.args[:3]
    assert isinstance(output, fx.Node)
    place = walk.need_home(node, output)
    if place.kind != "split":
        return otherwise(walk, node)
    only_ranges(place)
    if place.dim == 0:
        raise Conflict("an output is split by samples", place)
    size = shape(output)[place.dim]
    walk.rewritten[node] = lambda build, rank: build.call(
        own.leave.default, build.of(output), build.of(rows), number, place.dim, place.cuts[rank][0][0], size
    )
    return PARTIAL
