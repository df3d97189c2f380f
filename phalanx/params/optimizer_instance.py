"""An optimizer that the user made for a module, as what a run is told: its class, its arguments, its groups.

Ranks make optimizers for what they hold, so an instance is read, never stepped. State that it has by now would be lost,
and is refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.errors import ConfigError
from phalanx.params.groups import ParameterGroup

_OWN = ("params", "lr", "weight_decay")  # what groups may have of their own
_HOW = ("foreach", "fused", "capturable", "differentiable", "maximize")  # how it computes; a run decides
_ADAMW = ("betas", "eps")  # for which a run has options


@dataclass(frozen=True)
class Named:
    """A condition on parameters: those with these names."""

    names: frozenset[str]
    shown: str

    def __call__(self, name: str, tensor: Tensor) -> bool:
        return name in self.names

    @property
    def __name__(self) -> str:
        return self.shown


@dataclass(frozen=True)
class ReadOptimizer:
    """options: of a run. kind: None where an option names it."""

    kind: type[torch.optim.Optimizer] | None
    options: dict[str, Any]
    groups: tuple[ParameterGroup, ...]


def read_optimizer(optimizer: torch.optim.Optimizer, model: Any) -> ReadOptimizer:
    """What a run must be told to update as this instance would."""
    name = type(optimizer).__name__
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"optimizer is a {name} of parameters that the run does not know: the model is not a module in memory",
            "give the module, or the optimizer's class (optimizer_class=)",
        )
    if optimizer.state:
        raise ConfigError(
            f"optimizer {name} has state from earlier steps, which would be lost", "give one that has not stepped"
        )
    lr = float(optimizer.param_groups[0]["lr"])
    names = {id(parameter): key for key, parameter in model.named_parameters(remove_duplicate=True)}
    groups = [_group(group, number, names, lr, name) for number, group in enumerate(optimizer.param_groups)]
    chosen = {id(p) for group in optimizer.param_groups for p in group["params"]}
    rest = frozenset(key for ident, key in names.items() if ident not in chosen)
    if rest:
        groups.append(ParameterGroup(Named(rest, f"not in {name}"), freeze=True))
    is_named = type(optimizer) is torch.optim.AdamW
    options = {"lr": lr, **_arguments(optimizer), **({"optimizer": "adamw"} if is_named else {})}
    return ReadOptimizer(None if is_named else type(optimizer), options, tuple(groups))


def _group(group: Mapping[str, Any], number: int, names: Mapping[int, str], lr: float, name: str) -> ParameterGroup:
    unknown = [p for p in group["params"] if id(p) not in names]
    if unknown:
        raise ConfigError(
            f"group {number} of optimizer {name} holds a tensor of shape {list(unknown[0].shape)} that is no parameter "
            "of the model",
            "make the optimizer of the parameters of the module that you train",
        )
    mine = frozenset(names[id(p)] for p in group["params"])
    return ParameterGroup(
        Named(mine, f"group {number} of {name}"), lr=float(group["lr"]) / lr, decay=group.get("weight_decay")
    )


def _arguments(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Those that all groups share."""
    kind = type(optimizer)
    taken = inspect.signature(kind).parameters
    first = {
        key: value for key, value in optimizer.param_groups[0].items() if key in taken and key not in (*_OWN, *_HOW)
    }
    for number, group in enumerate(optimizer.param_groups):
        for key, value in first.items():
            if group[key] != value:
                raise ConfigError(
                    f"group {number} of optimizer {kind.__name__} has {key} = {group[key]!r}, and group 0 {value!r}",
                    "groups may differ in lr and weight_decay only",
                )
    known = {key: first.pop(key) for key in (_ADAMW if kind is torch.optim.AdamW else ())}
    usual = {key: taken[key].default for key in first}
    changed = {key: value for key, value in first.items() if value != usual[key]}
    return {**known, "optimizer_options": changed} if changed else known
