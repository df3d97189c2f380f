"""A graph as a Python function that calls one operator after the other.

What fx writes looks every operator up by its four names at each call and enters a Python frame for it, which together
takes as long as a small operator. Here operators and constants are found once. For real tensors, without autograd: our
own operators are called as the functions they are (`ops/own.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import fx

from phalanx.model.ops.own import FUNCTIONS

aten = torch.ops.aten

# The same operators as torch's own Python functions, which read their arguments faster: the most frequent ones.
_FAST: dict[Any, Callable[..., Any]] = {
    aten.add.Tensor: torch.add, aten.expand.default: torch.Tensor.expand, aten.mm.default: torch.mm,
    aten.mul.Tensor: torch.mul, aten.permute.default: torch.permute, aten.t.default: torch.t,
    aten.transpose.int: torch.transpose, aten.unsqueeze.default: torch.unsqueeze, aten.view.default: torch.Tensor.view,
}  # fmt: skip


def as_function(graph: fx.Graph) -> Callable[..., Any]:
    """What is read for the last time is let go of."""
    names = {node: f"v{number}" for number, node in enumerate(graph.nodes)}
    known: dict[str, Any] = {}  # operators and constants
    last = {used: node for node in graph.nodes for used in (node, *node.all_input_nodes)}
    lines = [f"def run({', '.join(names[node] for node in graph.nodes if node.op == 'placeholder')}):"]
    for node in graph.nodes:
        if node.op == "output":
            lines.append(f"  return {_text(node.args[0], names, known)}")
        elif node.op == "call_function":
            lines.append(f"  {names[node]} = {_call(node, names, known)}")
            lines += _let_go(names[used] for used in (node, *node.all_input_nodes) if last[used] is node)
    exec(compile("\n".join(lines), f"<{len(names)} operators>", "exec"), known)
    return known["run"]


def _call(node: fx.Node, names: dict[fx.Node, str], known: dict[str, Any]) -> str:
    arguments = [_text(value, names, known) for value in node.args]
    arguments += [f"{name}={_text(value, names, known)}" for name, value in node.kwargs.items()]
    return f"{_known(_callable(node.target), known)}({', '.join(arguments)})"


def _callable(target: Any) -> Callable[..., Any]:
    if target in FUNCTIONS:
        return FUNCTIONS[target]
    return _FAST.get(target) or (target._op if isinstance(target, torch._ops.OpOverload) else target)


def _text(value: Any, names: dict[fx.Node, str], known: dict[str, Any]) -> str:
    if isinstance(value, fx.Node):
        return names[value]
    if not _holds_nodes(value):
        return _known(value, known)
    parts = ", ".join(_text(part, names, known) for part in value)
    return f"({parts},)" if isinstance(value, tuple) else f"[{parts}]"


def _holds_nodes(value: Any) -> bool:
    return isinstance(value, fx.Node) or (isinstance(value, list | tuple) and any(map(_holds_nodes, value)))


def _known(value: Any, known: dict[str, Any]) -> str:
    name = f"k{len(known)}"
    known[name] = value
    return name


def _let_go(names: Iterable[str]) -> list[str]:
    found = list(dict.fromkeys(names))
    return [f"  {' = '.join(found)} = None"] if found else []
