"""A block's graph in the form that is easy to split: shapes on every node, biases and flattening taken off products.

The same function, but what would stand in the way of a split is gone: a product on flattened tokens is one on tokens, a
bias is added by itself (it must be added once, after the sum over ranks), and the loss is in two parts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

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
        elif node.target is aten.addmm.default and not node.kwargs:
            _take_bias_off(graph, node, node.args[1:3], node.args[0])
        elif node.target is own.cross_entropy_sum.default:
            _divide_loss(graph, node)
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
