"""Rules of operators that take a part: of a fused projection a section, of which every rank needs its share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from phalanx.model.shard.placement import PARTIAL, WHOLE, Conflict, Cutting, NoElement, Origin, Placement, Range, total
from phalanx.model.shard.rules.common import not_repeated, otherwise, same_if_partial
from phalanx.model.shard.rules.views import keep_together
from phalanx.model.shard.walk import Place, Walk, shape

aten = torch.ops.aten
SPLITS = (aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default)


def sections(walk: Walk, node: fx.Node) -> Place:
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
    """The part of a split value that lies in a range of the split dim; every rank must have its share of it. Where
    there is too little of it, it is with some ranks, whose parts in their places are summands of it."""
    not_repeated(place)
    start, stop = wanted
    crosses = any(a < start < b or a < stop < b for ranges in place.cuts for a, b in ranges)
    cuts = tuple(
        tuple((max(a, start) - start, min(b, stop) - start) for a, b in ranges if a < stop and b > start)
        for ranges in place.cuts
    )
    assert place.origin is not None
    try:
        origin = replace(place.origin, offset=place.origin.element(start))
    except NoElement:
        raise Conflict("a part of a split dim that its weight does not hold", place) from None
    if not crosses and all(cuts):
        return Placement("split", place.dim, cuts, origin)
    if crosses or not {origin.offset, place.origin.element(stop)} <= walk.edges(place):
        cut_at(walk, place, wanted)
    return PARTIAL


def cut_at(walk: Walk, place: Placement, wanted: Sequence[int]) -> None:
    """Makes sections of the weight begin and end there."""

    def change(cutting: Cutting, origin: Origin) -> bool:
        edges = {origin.element(edge) for edge in wanted} - {0, cutting.size}
        if edges <= cutting.bounds:
            return False
        cutting.bounds |= edges
        cutting.given.clear()
        return True

    walk.refine(place, change)


def item(walk: Walk, node: fx.Node) -> Place:
    source, index = node.args
    assert isinstance(source, fx.Node) and isinstance(index, int)
    place = walk.places[source][index]
    parent = source.args[0]
    if source.target in SPLITS and isinstance(parent, fx.Node) and (whole := walk.of(parent, source)).kind == "split":
        at = int(source.args[2] if len(source.args) > 2 else 0) % len(shape(parent))  # pyright: ignore
        if at == whole.dim:
            start = sum(item.shape[at] for item in source.meta["val"][:index])
            _slice_locally(walk, node, parent, whole, (start, start + shape(node)[at]), place)
    return place


def _slice_locally(
    walk: Walk, node: fx.Node, x: fx.Node, place: Placement, wanted: Range, part: Placement
) -> None:  # fmt: skip
    """part: how the result lies; as a summand, it is as long as the result."""
    start, stop = wanted

    def built(build: Any, rank: int) -> Any:
        before = sum(min(b, start) - a for a, b in place.cuts[rank] if a < start)
        inside = [(max(a, start), min(b, stop)) for a, b in place.cuts[rank] if a < stop and b > start]
        local = build.call(aten.slice.Tensor, build.of(x), place.dim, before, before + total(tuple(inside)))
        if part.kind == "split":
            return local
        first, last = inside[0] if inside else (start, start)
        around = [0, 0] * (len(shape(x)) - 1 - place.dim) + [first - start, stop - last]
        return build.call(aten.constant_pad_nd.default, local, around)

    walk.rewritten[node] = built


def slice_(walk: Walk, node: fx.Node) -> Place:
    x = node.args[0]
    assert isinstance(x, fx.Node)
    place = walk.of(x, node)
    if place.kind != "split":
        return same_if_partial(walk, node)
    dim, start, stop, step = _bounds(node, shape(x))
    if dim != place.dim:
        return place
    if not isinstance(start, int) or not isinstance(stop, int):
        raise Conflict("a slice of a split dim that is not a constant", place)
    if step != 1:
        return _every(walk, node, x, place, start, stop, step)
    part = _section(walk, place, (start, stop))
    _slice_locally(walk, node, x, place, (start, stop), part)
    return part


def _every(walk: Walk, node: fx.Node, x: fx.Node, place: Placement, start: int, stop: int, step: int) -> Place:
    """Each `step`-th element of the split dim, of what ranks keep together: gate and up in turn, say."""
    not_repeated(place)
    if start >= step or stop != shape(x)[place.dim] or stop % step:
        raise Conflict("a slice of a part of a split dim with a step", place)
    if any(edge % step for ranges in place.cuts for part in ranges for edge in part):
        keep_together(walk, place, step)
    walk.rewritten[node] = lambda build, rank: build.call(
        aten.slice.Tensor, build.of(x), place.dim, start, total(place.cuts[rank]), step
    )
    return place.scaled(place.dim, by=step)


def _bounds(node: fx.Node, size: torch.Size) -> tuple[int, Any, Any, Any]:
    _, dim, start, stop, step = (*node.args, *(0, None, None, 1)[len(node.args) - 1 :])
    dim = int(dim) % len(size)  # pyright: ignore
    start, stop = 0 if start is None else start, size[dim] if stop is None else stop
    if isinstance(start, int) and isinstance(stop, int):
        start, stop = (edge + size[dim] if edge < 0 else min(edge, size[dim]) for edge in (start, stop))
    return dim, start, stop, step


def select(walk: Walk, node: fx.Node) -> Place:
    x = node.args[0]
    assert isinstance(x, fx.Node)
    place = walk.of(x, node)
    dim = int(node.args[1]) % len(shape(x))  # pyright: ignore
    if place.kind == "split":
        if dim == place.dim:
            raise Conflict("one index of a split dim", place)
        return place.moved(place.dim - (dim < place.dim))
    return same_if_partial(walk, node)


def index(walk: Walk, node: fx.Node) -> Place:
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
