"""How a HuggingFace model's tensors are called and shaped on disk, worked out without their values.

transformers stores some architectures in another form than it holds them (experts apart, older names) and undoes that
when loading. It converts whole state dicts; here the smallest groups of tensors that convert alike are found, so that
an export can stream.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

Shapes = Mapping[str, tuple[int, ...]]
Group = tuple[str, ...]


class DiskNames:
    """Turns a stream of a model's tensors into a stream of tensors as they are stored."""

    def __init__(self, model: PreTrainedModel, shapes: Shapes) -> None:
        self._model = model
        self._shapes = shapes
        self.stored = self._converted_shapes(tuple(shapes))
        self._group_of = {name: group for group in self._groups() for name in group}

    def convert(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yields stored tensors as soon as the tensors they are made from have come by."""
        waiting: dict[Group, dict[str, Tensor]] = defaultdict(dict)
        for name, tensor in tensors:
            group = self._group_of[name]
            waiting[group][name] = tensor
            if len(waiting[group]) == len(group):
                yield from revert_weight_conversion(self._model, waiting.pop(group)).items()
        assert not waiting, f"tensors never came: {sorted(set().union(*waiting) - set().union(*waiting.values()))}"

    def _groups(self) -> list[Group]:
        """One tensor alone where that converts as the whole model does, else a layer, else all that is left."""
        names = tuple(self._shapes)
        if self.stored == dict(self._shapes):
            return [(name,) for name in names]
        groups: list[Group] = []
        left = names
        for part_of in (str, _layer, lambda name: ""):
            for group in _grouped(left, part_of):
                if self._converts_alike(group):
                    groups.append(group)
            settled = set().union(*groups)
            left = tuple(name for name in names if name not in settled)
        return groups if not left else [names]

    def _converts_alike(self, group: Group) -> bool:
        try:
            converted = self._converted_shapes(group)
        except Exception:
            return False  # a conversion that misses its other tensors may fail in any way
        return all(self.stored.get(key) == shape for key, shape in converted.items())

    def _converted_shapes(self, group: Group) -> dict[str, tuple[int, ...]]:
        on_meta = {name: torch.empty(self._shapes[name], device="meta") for name in group}
        return {key: tuple(tensor.shape) for key, tensor in revert_weight_conversion(self._model, on_meta).items()}


def _layer(name: str) -> str:
    """The part of a name up to its first number: `model.layers.3`."""
    found = re.match(r".*?\.\d+(?=\.)", name)
    return found[0] if found else ""


def _grouped(names: Group, part_of: Callable[[str], str]) -> list[Group]:
    parts: dict[str, list[str]] = defaultdict(list)
    for name in names:
        parts[part_of(name)].append(name)
    return [tuple(group) for group in parts.values()]
