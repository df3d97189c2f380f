"""Graphs as text, a canonical form of an `fx.Graph` that can be hashed, cached and read back; and their FLOPs.

Two graphs with the same text compute the same function of their placeholders, so the hash of the text is a graph's
identity: layers that share it share one traced and compiled function. FLOPs are expressions over the dynamic dims, of
matrix products, convolutions and attention only (a multiply-add is two), forward only; everything else is bandwidth.
Causal attention is counted as the half that is really computed.
"""

from __future__ import annotations

import builtins
import hashlib
import json
import math
import operator
from collections.abc import Callable
from typing import Any

import sympy
import torch
from torch import fx

_MODULES: dict[str, Any] = {"operator": operator, "math": math, "torch": torch, "builtins": builtins}


def fingerprint(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def dump(graph: fx.Graph) -> str:
    """One JSON line per node: [operation, target, args, kwargs], nodes referred to by their line number.

    A placeholder's name is its role and is kept; all other names are forgotten.
    """
    index: dict[fx.Node, int] = {}
    lines: list[str] = []
    for node in graph.nodes:
        index[node] = len(lines)
        target = node.name if node.op == "placeholder" else _target_name(node)
        row = [node.op, target, _encode(node.args, index), _encode(dict(node.kwargs), index)]
        lines.append(json.dumps(row, separators=(",", ":")))
    return "\n".join(lines)


def load(text: str) -> fx.Graph:
    graph = fx.Graph()
    nodes: list[fx.Node] = []
    for line in text.splitlines():
        op, target, args, kwargs = json.loads(line)
        args, kwargs = tuple(_decode(args, nodes)), _decode(kwargs, nodes)
        if op == "placeholder":
            nodes.append(graph.placeholder(target))
        elif op == "output":
            nodes.append(graph.output(args[0]))
        else:
            nodes.append(graph.create_node(op, _target(target), args, kwargs))
    return graph


def _target_name(node: fx.Node) -> str:
    target = node.target
    if node.op == "output":
        return "output"
    assert node.op == "call_function", f"{node.op} {target} must be inlined before a graph becomes text"
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    module = {"_operator": "operator"}.get(target.__module__, target.__module__)  # pyright: ignore
    return f"{module}.{target.__name__}"  # pyright: ignore


def _target(name: str) -> Callable[..., Any]:
    root, *path = name.split(".")
    found: Any = _MODULES[root] if root in _MODULES else getattr(torch.ops, root)
    for part in path:
        found = getattr(found, part)
    return found


def _encode(value: Any, index: dict[fx.Node, int]) -> Any:
    if isinstance(value, fx.Node):
        return {"node": index[value]}
    if isinstance(value, list | tuple):
        return [_encode(item, index) for item in value]
    if isinstance(value, dict):
        return {"dict": {key: _encode(item, index) for key, item in value.items()}}
    if isinstance(value, torch.dtype | torch.layout | torch.memory_format):
        return {"torch": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": value.type}
    if isinstance(value, slice):
        return {"slice": [_encode(part, index) for part in (value.start, value.stop, value.step)]}
    assert value is None or isinstance(value, bool | int | float | str), f"cannot write {type(value)} as text"
    return value


def _decode(value: Any, nodes: list[fx.Node]) -> Any:
    if isinstance(value, list):
        return [_decode(item, nodes) for item in value]
    if not isinstance(value, dict):
        return value
    [(kind, content)] = value.items()
    if kind == "node":
        return nodes[content]
    if kind == "dict":
        return {key: _decode(item, nodes) for key, item in content.items()}
    if kind == "torch":
        return getattr(torch, content)
    if kind == "device":
        return torch.device(content)
    return slice(*(_decode(part, nodes) for part in content))


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
