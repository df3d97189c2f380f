"""Lists of repeated layers, where a model's depth is, and which unit of a layer each node belongs to.

A unit is the part of a block that can have a tensor strategy of its own: a layer's attention(s), its feed-forward.
Norms belong to the unit that follows them, residual additions to the unit before them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import fx, nn

import phalanx.model.ops.operators  # noqa: F401  (defines an operator named below)


@dataclass(frozen=True)
class LayerList:
    """A list of repeated layers in a model: 'model.layers' with 32 of them."""

    path: str
    count: int


def find_layers(model: nn.Module) -> list[LayerList]:
    """The outermost lists of two or more parts of one class that have parameters."""
    found: list[LayerList] = []

    def visit(module: nn.Module, path: str) -> None:
        for name, child in module.named_children():
            child_path = f"{path}.{name}" if path else name
            if isinstance(child, nn.ModuleList | nn.Sequential) and _repeats(child):
                found.append(LayerList(child_path, len(child)))
            else:
                visit(child, child_path)

    visit(model, "")
    return found


def _repeats(children: nn.ModuleList | nn.Sequential) -> bool:
    classes = {type(child) for child in children}
    return len(children) >= 2 and len(classes) == 1 and any(True for _ in children[0].parameters())


def layer_of(path: str, layers: Iterable[LayerList]) -> tuple[str, int] | None:
    """(list path, index) of the layer a module path lies in."""
    for layer_list in layers:
        if path.startswith(layer_list.path + "."):
            return layer_list.path, int(path[len(layer_list.path) + 1 :].split(".")[0])
    return None


aten = torch.ops.aten
_PRODUCTS = (
    aten.linear.default, aten.addmm.default, aten.mm.default, aten.bmm.default, aten.matmul.default,
    torch.ops.phalanx.grouped_matmul.default,
)  # fmt: skip
FEED_FORWARD = "feed-forward"


def unit_of(nodes: Sequence[fx.Node], layers: Iterable[LayerList]) -> dict[fx.Node, str]:
    """Unit names per node: the name of each part that attends ('self_attn'), 'feed-forward' for the other products.

    Nodes outside layers (embedding, head) have the unit ''.
    """
    layers = list(layers)
    parts = [_part(node, layers) for node in nodes]
    attending = {
        part
        for node, part in zip(nodes, parts, strict=True)
        if part and node.target in (torch.ops.phalanx.attention.default, aten.scaled_dot_product_attention.default)
    }
    computing = {part for node, part in zip(nodes, parts, strict=True) if part and node.target in _PRODUCTS}
    return _spread(nodes, parts, attending, computing)


def _spread(
    nodes: Sequence[fx.Node], parts: Sequence[str | None], attending: set[str], computing: set[str]
) -> dict[fx.Node, str]:
    units: dict[fx.Node, str] = {}
    waiting: list[fx.Node] = []
    current = ""
    for node, part in zip(nodes, parts, strict=True):
        if part is None:
            units[node] = ""
        elif part in attending or part in computing:
            current = part if part in attending else FEED_FORWARD
            units.update(dict.fromkeys([*waiting, node], current))
            waiting.clear()
        elif part == "" and not waiting and current:
            units[node] = current  # the layer's own glue: a residual addition after a unit
        else:
            waiting.append(node)
    units.update(dict.fromkeys(waiting, current))
    return units


def _part(node: fx.Node, layers: Sequence[LayerList]) -> str | None:
    """The direct child of the layer a node lies in ('' for the layer's own code), None outside layers.

    Layers that only hold a list of parts (T5) are looked through.
    """
    path = node.meta.get("path", "")
    for layer_list in layers:
        if path.startswith(layer_list.path + "."):
            below = path[len(layer_list.path) + 1 :].split(".")[1:]
            if below[:1] == ["layer"]:
                below = below[1:]
                return ".".join(below[:2]) if len(below) > 1 else ""
            return below[0] if below else ""
    return None
