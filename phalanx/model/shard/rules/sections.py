"""Rules of operators that take a part: of a fused projection a section, of which every rank needs its share."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from phalanx.model.shard.placement import PARTIAL, WHOLE, Conflict, Cutting, Origin, Placement, Range
from phalanx.model.shard.rules.common import otherwise, same_if_partial
from phalanx.model.shard.walk import Place, Walk, shape

aten = torch.ops.aten


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


def item(walk: Walk, node: fx.Node) -> Place:
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


def slice_(walk: Walk, node: fx.Node) -> Place:
    x = node.args[0]
    assert isinstance(x, fx.Node)
    place = walk.of(x, node)
    if place.kind != "split":
        return same_if_partial(walk, node)
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
