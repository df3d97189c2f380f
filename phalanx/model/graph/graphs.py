"""Graphs as text: a canonical form of an `fx.Graph` that can be hashed, cached and read back.

Two graphs with the same text compute the same function of their placeholders, so the hash of the text is a graph's
identity: layers that share it share one traced and compiled function.
"""

from __future__ import annotations

import builtins
import hashlib
import json
import math
import operator
from collections.abc import Callable
from typing import Any

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
