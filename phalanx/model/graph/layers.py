"""Lists of repeated layers: where a model's depth is."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn


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
