"""A whole model as one graph, before it is cut: what every pass over it works on.

Nodes know the module they came from (`meta["path"]`), placeholders have roles instead of positions.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from phalanx.errors import CaptureError


@dataclass
class FlatGraph:
    """A whole model as one graph. `roles` says what each placeholder is: (kind, name) with kind one of
    parameter, buffer, constant, input, size (an expression over dynamic dims), dropout (a site's keys)."""

    graph: fx.Graph
    roles: dict[fx.Node, tuple[str, str]]
    symbols: dict[str, str]  # the exporter's size symbols → names of dynamic dims ('s34' → 'tokens')
    constants: dict[str, torch.Tensor] = field(default_factory=dict)
    loss: fx.Node | None = None  # a sum over items, once `normalise` is done
    count: fx.Node | None = None  # the number of items in that sum, computed from inputs alone

    def placeholder(self, kind: str, name: str) -> fx.Node:
        """The placeholder with this role, added after the existing ones when it is new."""
        for node, role in self.roles.items():
            if role == (kind, name):
                return node
        anchor = [node for node in self.graph.nodes if node.op == "placeholder"][-1]
        with self.graph.inserting_after(anchor):
            node = self.graph.placeholder(f"{kind}_{len(self.roles)}")
        node.meta["path"] = ""
        self.roles[node] = (kind, name)
        return node

    def dims_in(self, value: Any) -> set[str | None]:
        """The dynamic dims that a size depends on."""
        symbols = value.node.expr.free_symbols if isinstance(value, torch.SymInt) else ()
        return {self.symbols.get(str(symbol)) for symbol in symbols}

    def size(self, value: Any) -> fx.Node | int:
        """A size as a number, or as the placeholder named by its expression over the dynamic dims."""
        expression = value.node.expr if isinstance(value, torch.SymInt | torch.SymBool) else value
        if getattr(expression, "is_number", True):
            return int(expression)
        if unknown := {str(s) for s in expression.free_symbols} - set(self.symbols):
            raise CaptureError(
                f"a size depends on the data ({', '.join(sorted(unknown))})",
                "shapes must follow from the shapes of the inputs alone",
            )
        names = {symbol: self.symbols[str(symbol)] for symbol in expression.free_symbols}
        return self.placeholder("size", str(expression.subs(names)))


def where(node: fx.Node) -> str:
    """The module and source line a node came from, for error messages."""
    trace = node.meta.get("stack_trace") or ""
    lines = [line.strip() for line in trace.strip().splitlines() if line.strip()]
    source = " ".join(lines[-2:]) if lines else "unknown line"
    return f"module '{node.meta.get('path') or '<root>'}', {source}"


def replace(graph: fx.Graph, node: fx.Node, new: Any) -> None:
    """Every use of `node` becomes `new`, a node or a number; `node` is gone."""
    if isinstance(new, fx.Node):
        node.replace_all_uses_with(new)
    else:
        for user in list(node.users):
            user.args = map_arg(user.args, lambda n: new if n is node else n)
            user.kwargs = map_arg(user.kwargs, lambda n: new if n is node else n)
    graph.erase_node(node)
