"""What the rules of operators share: the one for operators that have none, and small questions."""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx

from phalanx.model.shard.placement import PARTIAL, WHOLE, Conflict, Placement, tiles
from phalanx.model.shard.walk import Place, Walk


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


def is_partial(walk: Walk, value: fx.Node, user: fx.Node) -> bool:
    return walk.live[value] and not walk.is_weight(value) and walk.of(value, user).kind == "partial"


def only_ranges(place: Placement) -> None:
    not_repeated(place)
    if any(len(ranges) != 1 for ranges in place.cuts) or not tiles(place.cuts):
        raise Conflict("a split into several ranges cannot be numbered", place)


def not_repeated(place: Placement) -> None:
    if place.outer > 1:
        raise Conflict("a split dim is merged into another", place)


def same_if_partial(walk: Walk, node: fx.Node) -> Place:
    x = node.args[0]
    assert isinstance(x, fx.Node)
    if is_partial(walk, x, node):
        return PARTIAL
    walk.need_whole(node, x)
    return WHOLE
