"""A block's graph in the form that is easy to split: shapes on every node, biases and flattening taken off products.

The same function, but what would stand in the way of a split is gone: a product on flattened tokens is one on tokens, a
bias is added by itself (it must be added once, after the sum over ranks), what is picked from features divided into
queries, keys and values is a slice of the features, and the loss is in two parts.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from phalanx.model.shard.placement import groups

aten, own = torch.ops.aten, torch.ops.phalanx


def loss_part(logits: Any, targets: Any, ignore_index: int, smoothing: float) -> Any:
    """Stands for what one rank contributes to the loss; never called."""
    raise AssertionError


def loss_join(part: Any, logits: Any, targets: Any, ignore_index: int, smoothing: float) -> Any:
    """Stands for the loss made of all ranks' parts; never called."""
    raise AssertionError


def annotate(graph: fx.Graph, arguments: Mapping[fx.Node, Any], units: Mapping[fx.Node, str]) -> None:
    """Gives every node its (fake) value and its unit."""
    for node in graph.nodes:
        if node.op == "placeholder":
            node.meta["val"] = arguments[node]
        elif node.op == "call_function":
            args, kwargs = (map_arg(a, lambda n: n.meta["val"]) for a in (node.args, node.kwargs))
            node.meta["val"] = node.target(*args, **kwargs)  # pyright: ignore
        node.meta["unit"] = units.get(node, "")


def canonicalise(graph: fx.Graph) -> None:
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if node.target is aten.reshape.default and _shape(node) == _shape(node.args[0]):
            node.replace_all_uses_with(node.args[0])  # pyright: ignore
        elif node.target is aten.linear.default and len(node.args) > 2 and node.args[2] is not None:
            _take_bias_off(graph, node, node.args[:2], node.args[2])
        elif node.target in (aten.conv1d.default, aten.conv2d.default) and len(node.args) > 2:
            _take_bias_off_channels(graph, node)
        elif node.target is aten.addmm.default and not node.kwargs:
            _take_bias_off(graph, node, node.args[1:3], node.args[0])
        elif node.target is own.cross_entropy_sum.default:
            _divide_loss(graph, node)
        elif node.target is own.leave.default:
            _end_in_segment(graph, node)
        elif node.target is aten.select.int:
            _pick(graph, node, *node.args)  # pyright: ignore
        elif node.target is operator.getitem and node.args[0].target is aten.unbind.int:  # pyright: ignore
            x, *dim = node.args[0].args  # pyright: ignore
            _pick(graph, node, x, dim[0] if dim else 0, node.args[1])  # pyright: ignore
    graph.eliminate_dead_code()
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target is aten.mm.default:
            _unflatten(graph, node)
    graph.eliminate_dead_code()


def _shape(node: Any) -> torch.Size:
    return node.meta["val"].shape


def _make(graph: fx.Graph, like: fx.Node, target: Any, args: tuple[Any, ...], value: Any) -> fx.Node:
    node = graph.call_function(target, args)
    node.meta.update(val=value, unit=like.meta["unit"])
    return node


def _take_bias_off(graph: fx.Graph, node: fx.Node, operands: tuple[Any, ...], bias: Any) -> None:
    product = aten.linear.default if node.target is aten.linear.default else aten.mm.default
    with graph.inserting_before(node):
        plain = _make(graph, node, product, operands, node.meta["val"])
        added = _make(graph, node, aten.add.Tensor, (plain, bias), node.meta["val"])
    node.replace_all_uses_with(added)
    graph.erase_node(node)


def _take_bias_off_channels(graph: fx.Graph, node: fx.Node) -> None:
    x, weight, bias, *others = node.args
    if not isinstance(bias, fx.Node) or node.kwargs:
        return
    with graph.inserting_before(node):
        plain = _make(graph, node, node.target, (x, weight, None, *others), node.meta["val"])
        for _ in range(len(_shape(node)) - 2):
            bias = _call(graph, node, aten.unsqueeze.default, bias, -1)
        added = _make(graph, node, aten.add.Tensor, (plain, bias), node.meta["val"])
    node.replace_all_uses_with(added)
    graph.erase_node(node)


def _unflatten(graph: fx.Graph, node: fx.Node) -> None:
    """reshape(…, [-1, n]) → mm (→ add bias) → reshape(…) as one matmul (and one add) on the tensor as it was."""
    flat, weight = node.args
    assert isinstance(flat, fx.Node)
    last = node
    if len(node.users) == 1 and next(iter(node.users)).target is aten.add.Tensor:
        last = next(iter(node.users))
    back = next(iter(last.users), None)
    if flat.target is not aten.reshape.default or back is None or len(last.users) != 1:
        return
    source = flat.args[0]
    wide = (*_shape(source)[:-1], _shape(node)[-1])
    if back.target is not aten.reshape.default or tuple(_shape(back)) != wide or _shape(source)[-1] != _shape(flat)[-1]:
        return
    with graph.inserting_before(back):
        result = _make(graph, node, aten.matmul.default, (source, weight), back.meta["val"])
        if last is not node:
            bias = next(a for a in last.args if a is not node)
            result = _make(graph, last, aten.add.Tensor, (result, bias), back.meta["val"])
    back.replace_all_uses_with(result)


def _pick(graph: fx.Graph, node: fx.Node, x: fx.Node, dim: int, index: int) -> None:
    """One index of a dim, taken from the features before they are divided where that can be."""
    dim, index = dim % len(_shape(x)), index % _shape(x)[dim]
    with graph.inserting_before(node):
        new = _picked(graph, node, x, dim, index)
        if new is None and node.target is operator.getitem:
            new = _call(graph, node, aten.select.int, x, dim, index)
    if new is not None:
        node.replace_all_uses_with(new)
        graph.erase_node(node)


def _picked(graph: fx.Graph, like: fx.Node, x: fx.Node, dim: int, index: int) -> fx.Node | None:
    if x.target is aten.transpose.int:
        order = list(range(len(_shape(x))))
        a, b = (int(d) % len(order) for d in x.args[1:3])  # pyright: ignore
        order[a], order[b] = b, a
    elif x.target is aten.permute.default:
        order = [int(d) % len(_shape(x)) for d in x.args[1]]  # pyright: ignore
    else:
        return _picked_from_features(graph, like, x, dim, index)
    source: Any = x.args[0]
    found = _picked(graph, like, source, order[dim], index)
    if found is None:
        return None
    left = [d - (d > order[dim]) for d in order if d != order[dim]]
    return _call(graph, like, aten.permute.default, found, left)


def _picked_from_features(graph: fx.Graph, like: fx.Node, x: fx.Node, dim: int, index: int) -> fx.Node | None:
    """x: features divided into several dims, the first of which is `dim`."""
    if x.target is not aten.reshape.default:
        return None
    source: Any
    sizes: Any
    source, sizes = x.args
    old, new = next((o, n) for o, n in groups(_shape(source), _shape(x)) if dim in n)
    if len(old) != 1 or len(new) == 1 or new[0] != dim:
        return None
    inner = math.prod(_shape(x)[d] for d in new if d > dim)
    part = _call(graph, like, aten.slice.Tensor, source, old[0], index * inner, (index + 1) * inner)
    return _call(graph, like, aten.reshape.default, part, [*sizes[:dim], *sizes[dim + 1 :]])


def _call(graph: fx.Graph, like: fx.Node, target: Any, *args: Any) -> fx.Node:
    return _make(graph, like, target, args, target(*map_arg(args, lambda node: node.meta["val"])))


def _end_in_segment(graph: fx.Graph, node: fx.Node) -> None:
    """A loss comes out of a segment, not out of a sum over ranks, which what stands for it is where an output leaves
    in parts."""
    with graph.inserting_after(node):
        end = _make(graph, node, aten.sum.default, (), node.meta["val"])
    node.replace_all_uses_with(end)
    end.args = (node,)


def _divide_loss(graph: fx.Graph, node: fx.Node) -> None:
    logits, targets, ignore, smoothing = node.args
    value: Tensor = node.meta["val"]
    with graph.inserting_before(node):
        rows: Tensor = logits.meta["val"]  # pyright: ignore
        wide = torch.float64 if rows.dtype == torch.float64 else torch.float32
        numbers = torch.empty(rows.shape[0], 3 if smoothing else 2, dtype=wide, device="meta")
        part = _make(graph, node, loss_part, (logits, targets, ignore, smoothing), numbers)
        whole = _make(graph, node, loss_join, (part, logits, targets, ignore, smoothing), value)
    node.replace_all_uses_with(whole)
    graph.erase_node(node)
