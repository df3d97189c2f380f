"""Takes out of a traced graph what computes nothing: detached copies, double transposes, first powers, the same view
twice. Each costs a call per step when a segment runs as it is; a compiler would find them itself.
"""

from __future__ import annotations

import torch
from torch import fx

aten = torch.ops.aten
_VIEWS = (
    aten.view.default, aten.t.default, aten.transpose.int, aten.slice.Tensor, aten.unsqueeze.default,
    aten.expand.default,
)  # fmt: skip


def simplify(graph: fx.Graph) -> None:
    """What the graph puts out stays as it is, so that outputs share memory with nothing new."""
    views: dict[str, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        same = _same_as(node)
        if same is None and node.target in _VIEWS:
            first = views.setdefault(f"{node.target}{node.args}{node.kwargs}", node)
            same = None if first is node else first
        if same is not None:
            node.replace_all_uses_with(same, delete_user_cb=lambda user: user.op != "output")
            if not node.users:
                graph.erase_node(node)


def _same_as(node: fx.Node) -> fx.Node | None:
    """The earlier node that has the same value, if this one adds nothing to it."""
    source = node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None
    if source is None:
        return None
    if node.target is aten.detach.default:
        return source
    if node.target is aten.t.default and source.target is aten.t.default:
        inner = source.args[0]
        return inner if isinstance(inner, fx.Node) else None
    return source if node.target is aten.pow.Tensor_Scalar and node.args[1] == 1 else None
