"""LoRA: small matrices beside the linear layers of a model, which are trained instead of them.

An adapted layer is the layer it was, with the same parameters under the same names, and `lora_A` and `lora_B` beside
them: y = W x + b + alpha / r · B A x. It is a part of the model before that is read as a graph, so that pipelines,
tensor parallelism and everything else follow from the graph. Files are `state/adapters.py`'s work.
"""

from __future__ import annotations

import fnmatch
import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from phalanx.errors import ConfigError, nearest
from phalanx.model.graph.units import find_layers, layer_of
from phalanx.model.weights.weights import Weights
from phalanx.state.layout import Box

_FORM = "write r=16, and besides alpha=32, dropout=0.05, targets=q_proj+v_proj as you like"
_LINEAR = (nn.Linear, Conv1D)
_A, _B = ".lora_A.weight", ".lora_B.weight"


@dataclass(frozen=True)
class Lora:
    """targets: the ends of the names, or patterns of the whole names, of linear layers; none for all those in the
    model's layers."""

    r: int
    alpha: float
    dropout: float = 0.0
    targets: tuple[str, ...] = ()

    @property
    def scale(self) -> float:
        return self.alpha / self.r

    @classmethod
    def read(cls, text: str) -> Lora:
        """From 'r=16,alpha=32,targets=q_proj+v_proj'; alpha is 2 r where it is not given."""
        given: dict[str, str] = {}
        for part in text.split(","):
            key, equals, value = (word.strip() for word in part.partition("="))
            if key not in ("r", "alpha", "dropout", "targets") or not equals or not value:
                raise ConfigError(f"option lora: {part.strip()!r} is no setting of adapters", _FORM)
            given[key] = value
        r, alpha, dropout = (_number(given, key) for key in ("r", "alpha", "dropout"))
        if not r or r < 1 or r != int(r):
            raise ConfigError(f"option lora = {text!r}: r must be a whole number of 1 or more", _FORM)
        if (alpha is not None and alpha <= 0) or not 0 <= (dropout or 0.0) < 1:
            raise ConfigError(f"option lora = {text!r}: alpha must be above 0, dropout from 0 to below 1", _FORM)
        targets = tuple(filter(None, given.get("targets", "").split("+")))
        return cls(int(r), 2 * r if alpha is None else alpha, dropout or 0.0, targets)


class AdaptedLinear(nn.Linear):
    """A linear layer with an adapter."""

    def forward(self, x: Tensor) -> Tensor:
        return _adapted(self, super().forward(x), x)


class AdaptedConv1D(Conv1D):
    """The same for the layers of GPT-2, whose weight is [in, out]."""

    def forward(self, x: Tensor) -> Tensor:
        return _adapted(self, super().forward(x), x)


def _adapted(layer: Any, output: Tensor, x: Tensor) -> Tensor:
    return output + layer.lora_B(layer.lora_A(layer.lora_dropout(x))) * layer.lora_scale


def add_adapters(model: nn.Module, lora: Lora) -> nn.Module:
    """Adapts the layers of a model, in place."""
    for _, layer in _chosen(model, lora):
        weight: Tensor = layer.weight  # pyright: ignore[reportAssignmentType]
        transposed = isinstance(layer, Conv1D)
        wide, tall = weight.shape if transposed else reversed(weight.shape)
        layer.__class__ = AdaptedConv1D if transposed else AdaptedLinear
        layer.lora_A = nn.Linear(wide, lora.r, bias=False, dtype=weight.dtype)
        layer.lora_B = nn.Linear(lora.r, tall, bias=False, dtype=weight.dtype)
        layer.lora_dropout = nn.Dropout(lora.dropout) if lora.dropout else nn.Identity()
        vars(layer)["lora_scale"] = lora.scale
        if not layer.lora_B.weight.is_meta:
            nn.init.zeros_(layer.lora_B.weight)
    return model


def adapted_layers(model: nn.Module) -> dict[str, bool]:
    """Path → whether its weight is [in, out], of every layer that has an adapter."""
    kinds = (AdaptedLinear, AdaptedConv1D)
    return {path: isinstance(layer, Conv1D) for path, layer in model.named_modules() if isinstance(layer, kinds)}


def is_adapter(name: str) -> bool:
    """Of a parameter."""
    return name.endswith((_A, _B))


def _chosen(model: nn.Module, lora: Lora) -> list[tuple[str, nn.Module]]:
    linear = [(path, part) for path, part in model.named_modules() if type(part) in _LINEAR]
    if not lora.targets:
        layers = find_layers(model)
        found = [(path, part) for path, part in linear if layer_of(path, layers) is not None]
        if not found:
            raise ConfigError(
                f"option lora: {type(model).__name__} has no linear layers in a list of layers",
                f"name some as targets={_some(path for path, _ in linear)}",
            )
        return found
    for target in lora.targets:
        if not any(_is_meant(path, target) for path, _ in linear):
            ends = dict.fromkeys(path.rpartition(".")[2] for path, _ in linear)
            raise ConfigError(f"option lora: no linear layer is called {target!r}", nearest(target, ends))
    return [(path, part) for path, part in linear if any(_is_meant(path, target) for target in lora.targets)]


def _is_meant(path: str, target: str) -> bool:
    return path == target or path.endswith(f".{target}") or fnmatch.fnmatchcase(path, target)


def _some(names: Iterable[str]) -> str:
    return "+".join(list(names)[:2])


class AdaptedWeights(Weights):
    """The weights of a model, and fresh ones of its adapters: A as torch's linear layers begin, B zero."""

    def __init__(self, base: Weights, shapes: Mapping[str, tuple[int, ...]], seed: int) -> None:
        self._base, self._seed = base, seed
        self._own = {name: shape for name, shape in shapes.items() if is_adapter(name)}

    def names(self) -> tuple[str, ...]:
        return (*self._base.names(), *self._own)

    def buffer_names(self) -> tuple[str, ...]:
        return self._base.buffer_names()

    def expect(self, names: Sequence[str]) -> None:
        self._base.expect([name for name in names if name not in self._own])

    def shape(self, name: str) -> tuple[int, ...]:
        return self._own[name] if name in self._own else self._base.shape(name)

    def _values(self, name: str, boxes: Sequence[Box]) -> list[Tensor]:
        if name not in self._own:
            return self._base._values(name, boxes)
        whole = self._fresh(name)
        return [whole[box.slices()].clone() for box in boxes]

    def _fresh(self, name: str) -> Tensor:
        shape = self._own[name]
        if name.endswith(_B):
            return torch.zeros(shape)
        key = hashlib.blake2b(f"{self._seed} {name}".encode(), digest_size=7).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(key, "little"))
        return (2 * torch.rand(shape, generator=generator) - 1) / math.sqrt(shape[1])


def merged(
    tensors: Iterable[tuple[str, Tensor]], layers: Mapping[str, bool], lora: Lora
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of the plain model: each adapted weight with its adapter added, as soon as all three came by.
    layers: as `adapted_layers` gives them."""
    waiting: dict[str, dict[str, Tensor]] = {path: {} for path in layers}
    for name, tensor in tensors:
        path = name.removesuffix(_A).removesuffix(_B).removesuffix(".weight")
        if path not in waiting or name == f"{path}.bias":
            yield name, tensor
            continue
        waiting[path][name.removeprefix(f"{path}.")] = tensor
        if len(waiting[path]) == 3:
            yield f"{path}.weight", _sum(waiting.pop(path), layers[path], lora.scale)
    assert not waiting, f"tensors never came: {sorted(waiting)}"


def _sum(parts: Mapping[str, Tensor], transposed: bool, scale: float) -> Tensor:
    weight = parts["weight"]
    wide = torch.float64 if weight.dtype == torch.float64 else torch.float32
    product = parts["lora_B.weight"].to(wide) @ parts["lora_A.weight"].to(wide) * scale
    return (weight.to(wide) + (product.T if transposed else product)).to(weight.dtype)


def _number(given: Mapping[str, str], key: str) -> float | None:
    if key not in given:
        return None
    try:
        return float(given[key])
    except ValueError:
        raise ConfigError(f"option lora: {key} = {given[key]!r} is not a number", _FORM) from None
