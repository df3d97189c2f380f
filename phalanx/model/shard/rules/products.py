"""Rules of products with weights, where splits begin and end: by columns, by rows, by vocabulary."""

from __future__ import annotations

import torch
from torch import fx

from phalanx.model.shard.cuts import tiles
from phalanx.model.shard.placement import PARTIAL, WHOLE, Conflict
from phalanx.model.shard.rules.common import only_ranges, otherwise
from phalanx.model.shard.walk import Place, Walk, shape

own = torch.ops.phalanx


def linear(walk: Walk, node: fx.Node, out_dim: int = 0, in_dim: int = 1) -> Place:
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


def matmul(walk: Walk, node: fx.Node) -> Place:
    return linear(walk, node, out_dim=1, in_dim=0)


def grouped(walk: Walk, node: fx.Node) -> Place:
    walk.need_whole(node, node.args[2])
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
