"""Deep models captured shallow: the first few layers are captured, the rest is stamped out from their templates.

Layers are classed by their structure (classes, shapes, scalar attributes). A prefix that holds every class twice is
captured; if two captured layers of one class turn out different (a constant that depends on the layer's index), or if
the wiring does not repeat, the whole depth is captured instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from phalanx.model.graph.blocks import Block, Blocks, Port
from phalanx.model.graph.units import LayerList

# Attributes that number the layers; everything else a module carries as a plain value is part of its structure.
_INDEX_NAMES = {"layer_idx", "layer_id", "layer_index", "block_idx", "training"}


class NotRepeating(Exception):
    """The captured layers do not repeat the way their structure says."""


def structure(layer: nn.Module) -> str:
    """Equal for layers that are built alike, whatever their values."""
    rows = [f"{name} {tuple(p.shape)} {p.dtype} {p.requires_grad}" for name, p in layer.named_parameters()]
    for name, module in layer.named_modules():
        scalars = {
            key: value
            for key, value in vars(module).items()
            if isinstance(value, bool | int | float | str | None) and key not in _INDEX_NAMES
        }
        rows.append(f"{name} {type(module).__qualname__} {sorted(scalars.items(), key=lambda item: item[0])}")
    return "\n".join(rows)


def prefix_length(classes: Sequence[str]) -> int:
    """The shortest prefix in which every class that occurs more than once occurs twice."""
    needed = 0
    for kind in set(classes):
        places = [i for i, other in enumerate(classes) if other == kind]
        needed = max(needed, places[min(1, len(places) - 1)] + 1)
    return needed


def truncate(model: nn.Module, layers: Sequence[LayerList]) -> dict[str, list[str]]:
    """Shortens each list of layers to its prefix, in place. Returns the classes of the full lists, by path."""
    classes: dict[str, list[str]] = {}
    for layer_list in layers:
        full = model.get_submodule(layer_list.path)
        assert isinstance(full, nn.ModuleList | nn.Sequential)
        classes[layer_list.path] = [structure(layer) for layer in full]
        del full[prefix_length(classes[layer_list.path]) :]
    return classes


def stamp(blocks: Blocks, classes: dict[str, list[str]]) -> Blocks:
    """The full model from a capture of its truncated form."""
    by_name = {block.name: block for block in blocks.blocks}
    for path, kinds in classes.items():
        captured = prefix_length(kinds)
        _require_repetition(by_name, path, kinds[:captured])
    result: list[Block] = []
    renamed: dict[str, str] = {}
    for block in blocks.blocks:
        result.append(_rename_activations(block, renamed))
        path, _, index = block.name.rpartition(".")
        if path in classes and int(index) == prefix_length(classes[path]) - 1:
            added = [_rename_activations(each, renamed) for each in _stamp_list(by_name, path, classes[path])]
            result.extend(added)
            if added:
                renamed.update(zip(block.outputs, added[-1].outputs, strict=True))
    return replace(blocks, blocks=tuple(result))


def _stamp_list(by_name: dict[str, Block], path: str, kinds: list[str]) -> list[Block]:
    captured = prefix_length(kinds)
    added: list[Block] = []
    for index in range(captured, len(kinds)):
        source = max(i for i in range(captured) if kinds[i] == kinds[index])
        _require_same_before(by_name, path, kinds, source, index)
        added.append(_move(by_name[f"{path}.{source}"], path, source, index))
    return added


def _require_same_before(by_name: dict[str, Block], path: str, kinds: Sequence[str], source: int, target: int) -> None:
    """The layer before gives as many outputs there as here: they are known by their number."""
    captured = prefix_length(kinds)
    before = max(i for i in range(captured) if kinds[i] == kinds[target - 1])
    if source > 0 and len(by_name[f"{path}.{before}"].outputs) != len(by_name[f"{path}.{source - 1}"].outputs):
        raise NotRepeating(f"{path}.{target} follows another layer than {path}.{source}")


def _move(block: Block, path: str, source: int, target: int) -> Block:
    """The same template as another layer of the list: own parameters, buffers and sites, and activations one layer
    on."""
    here, there = f"{path}.{source}", f"{path}.{target}"
    before, before_there = f"{path}.{source - 1}:", f"{path}.{target - 1}:"

    def move(port: Port) -> Port:
        if port.kind == "activation":
            return replace(port, name=port.name.replace(before, before_there)) if port.name.startswith(before) else port
        if port.name == here or port.name.startswith((here + ".", here + "#")):
            return replace(port, name=there + port.name[len(here) :])
        return port

    outputs = tuple(activation.replace(f"{here}:", f"{there}:") for activation in block.outputs)
    return replace(block, name=there, ports=tuple(move(port) for port in block.ports), outputs=outputs)


def _wired_alike(first: Block, second: Block, path: str, places: Sequence[int], kinds: Sequence[str]) -> bool:
    """Whether two layers read the same things. Which output of the layer before it is may differ where those layers are
    of different kinds: T5's first layer gives a bias, too, that all others read."""
    here, there = places
    if here == 0:
        return True  # what comes before the first layer is no layer
    moved, may_differ = _move(second, path, there, here), kinds[here - 1] != kinds[there - 1]

    def alike(own: Port, other: Port, original: Port) -> bool:
        both_before = own.name.startswith(f"{path}.{here - 1}:") and original.name.startswith(f"{path}.{there - 1}:")
        return own == other or (may_differ and own.kind == "activation" and both_before)

    ports = zip(first.ports, moved.ports, second.ports, strict=True)
    return replace(moved, ports=first.ports) == first and all(alike(*each) for each in ports)


def _rename_activations(block: Block, names: dict[str, str]) -> Block:
    ports = tuple(replace(p, name=names.get(p.name, p.name)) if p.kind == "activation" else p for p in block.ports)
    return replace(block, ports=ports)


def _require_repetition(by_name: dict[str, Block], path: str, kinds: Sequence[str]) -> None:
    """Two captured layers of one class must be each other's image, and only the last layer may feed what follows."""
    if again := [name for name in by_name if name.startswith(path + ".") and "#" in name]:
        raise NotRepeating(f"{again[0]} is the same layer applied again")
    for kind in set(kinds):
        places = [i for i, other in enumerate(kinds) if other == kind]
        if len(places) < 2:
            continue
        first, second = (by_name.get(f"{path}.{i}") for i in places[-2:])
        if first is None or second is None or first.template != second.template:
            raise NotRepeating(f"{path}.{places[-2]} and {path}.{places[-1]} differ")
        if not _wired_alike(first, second, path, places[-2:], kinds):
            raise NotRepeating(f"{path}.{places[-2]} and {path}.{places[-1]} are wired differently")
    inner = {f"{path}.{i}" for i in range(1, len(kinds) - 1)}
    for block in by_name.values():
        if not block.name.startswith(path + "."):
            for activation in block.names("activation"):
                if activation.rpartition(":")[0] in inner:
                    raise NotRepeating(f"{block.name} reads {activation}, from the middle of {path}")
