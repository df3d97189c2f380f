"""Floating-point operations of graph nodes, as expressions over the dynamic dims.

Only matrix products, convolutions and attention are counted (a multiply-add is two), forward only; everything else is
bandwidth. Causal attention is counted as the half that is really computed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sympy
import torch
from torch import fx

aten = torch.ops.aten


def _size(value: Any) -> Any:
    return value.node.expr if isinstance(value, torch.SymInt) else value


def _shape(node: Any) -> list[Any]:
    return [_size(size) for size in node.meta["val"].shape]


def _product(sizes: list[Any]) -> Any:
    total: Any = 1
    for size in sizes:
        total = total * size
    return total


def _matmul(node: fx.Node, left: int = 0) -> Any:
    """2 × elements of the result × length of the contraction."""
    return 2 * _product(_shape(node)) * _shape(node.args[left])[-1]


def _convolution(node: fx.Node) -> Any:
    weight = _shape(node.args[1])  # [out, in / groups, *kernel]
    return 2 * _product(_shape(node)) * _product(weight[1:])


def _attention(node: fx.Node) -> Any:
    batch, heads, queries, dim = _shape(node.args[0])
    keys, value_dim = _shape(node.args[1])[2], _shape(node.args[2])[3]
    causal, window = bool(node.args[7]), int(node.args[9])  # pyright: ignore
    pairs = queries * keys
    if causal:
        seen = sympy.Min(keys, window) if window else keys  # most keys a query sees; the first ones see fewer
        pairs = seen * queries - seen * seen / sympy.Integer(2)
    elif window:
        pairs = queries * sympy.Min(keys, 2 * window - 1)
    return 2 * batch * heads * pairs * (dim + value_dim)


def _scaled_dot_product(node: fx.Node) -> Any:
    batch, heads, queries, dim = _shape(node.args[0])
    keys, value_dim = _shape(node.args[1])[2], _shape(node.args[2])[3]
    return 2 * batch * heads * queries * keys * (dim + value_dim)


_RULES: dict[Any, Callable[[fx.Node], Any]] = {
    aten.linear.default: _matmul,
    aten.mm.default: _matmul,
    aten.bmm.default: _matmul,
    aten.matmul.default: _matmul,
    aten.addmm.default: lambda node: _matmul(node, left=1),
    aten.baddbmm.default: lambda node: _matmul(node, left=1),
    aten.conv1d.default: _convolution,
    aten.conv2d.default: _convolution,
    aten.conv3d.default: _convolution,
    aten.convolution.default: _convolution,
    aten.scaled_dot_product_attention.default: _scaled_dot_product,
}


def flops(node: fx.Node) -> Any:
    """Forward FLOPs of one node of an exported graph: a number or a sympy expression in the exporter's symbols."""
    if node.op != "call_function":
        return 0
    if node.target is torch.ops.phalanx.attention.default:
        return _attention(node)
    if node.target is torch.ops.phalanx.grouped_matmul.default:  # each row meets the weights of one expert only
        return _matmul(node)
    rule = _RULES.get(node.target)
    return rule(node) if rule else 0
