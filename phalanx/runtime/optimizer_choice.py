"""Which optimizer updates which parameters, with which arguments: from options to a torch optimizer.

What the user names or hands over is checked here, before anything is trained; running it is `optimizer.py`'s work.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from phalanx.config import RunConfig
from phalanx.errors import ConfigError, nearest
from phalanx.runtime.parameters import Weight

_ELEMENT_WISE = (
    torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD, torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.Adamax,
    torch.optim.NAdam, torch.optim.RAdam, torch.optim.RMSprop, torch.optim.Rprop, torch.optim.ASGD,
)  # fmt: skip
_NAMED: dict[str, type[torch.optim.Optimizer]] = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}


def make_optimizer(
    weights: Mapping[str, Weight], config: RunConfig, optimizer_class: type[Any] | None = None
) -> torch.optim.Optimizer:
    """The optimizer of the run, for these pieces. `optimizer_class` stands before the one that `config` names."""
    chosen = optimizer_class or _NAMED.get(config.optimizer) or _import(config.optimizer)
    if not (isinstance(chosen, type) and issubclass(chosen, torch.optim.Optimizer)):
        raise ConfigError(f"optimizer {chosen!r} is not a torch optimizer", "give a subclass of torch.optim.Optimizer")
    if _needs_closure(chosen):
        raise ConfigError(
            f"optimizer {chosen.__name__} evaluates the loss several times per step, which a program cannot do",
            "choose an optimizer whose step needs no closure",
        )
    _require_element_wise(chosen, weights)
    options = _arguments(chosen, config)
    decayed = _takes(chosen, "weight_decay")
    if not decayed and config.weight_decay != RunConfig.model_fields["weight_decay"].default:
        raise ConfigError(
            f"option weight_decay = {config.weight_decay} does nothing: {chosen.__name__} does not decay weights",
            "leave weight_decay out, or choose another optimizer",
        )
    try:
        return chosen(_groups(weights, config.weight_decay if decayed else None), **options)
    except (TypeError, ValueError, RuntimeError) as error:
        own = ("params", "weight_decay", *_own_options(chosen, config))
        allowed = [name for name in inspect.signature(chosen).parameters if name not in own]
        raise ConfigError(
            f"optimizer {chosen.__name__} refuses its arguments: {error}",
            f"optimizer_options may hold: {', '.join(allowed)}",
        ) from error


def decays(shape: Sequence[int]) -> bool:
    """Matrices decay; biases, norms and other vectors do not."""
    return len(shape) >= 2


def _groups(weights: Mapping[str, Weight], weight_decay: float | None) -> list[dict[str, Any]]:
    """The same groups on every rank, even where one of them has nothing in it."""
    if weight_decay is None:
        return [{"params": [weight.exact for weight in weights.values()]}]
    return [
        {"params": [w.exact for w in weights.values() if decays(w.piece.shape)], "weight_decay": weight_decay},
        {"params": [w.exact for w in weights.values() if not decays(w.piece.shape)], "weight_decay": 0.0},
    ]


def _require_element_wise(chosen: type[Any], weights: Mapping[str, Weight]) -> None:
    """A rank that holds part of a tensor can only update it if no element's update depends on the others."""
    if chosen in _ELEMENT_WISE or all(w.piece.is_whole and w.piece.local.is_whole for w in weights.values()):
        return
    known = ", ".join(sorted(kind.__name__ for kind in _ELEMENT_WISE))
    raise ConfigError(
        f"optimizer {chosen.__name__} is not known to update each element by itself, but the plan splits tensors",
        f"use zero=0 and tp=1, or one of torch's {known}",
    )


def _arguments(chosen: type[Any], config: RunConfig) -> dict[str, Any]:
    """What the class is called with besides its parameters."""
    arguments = _own_options(chosen, config)
    for name in ("weight_decay", *arguments):
        if name in config.optimizer_options:
            raise ConfigError(f"optimizer_options must not hold {name!r}", f"use the option {name} itself")
    fused = {"fused": True} if chosen in _NAMED.values() else {}
    return arguments | fused | config.optimizer_options


def _own_options(chosen: type[Any], config: RunConfig) -> dict[str, Any]:
    """The arguments for which a run has options of their own."""
    adamw = {"betas": config.betas, "eps": config.eps} if chosen is torch.optim.AdamW else {}
    return {"lr": config.lr, **adamw}


def _takes(chosen: type[Any], name: str) -> bool:
    return name in inspect.signature(chosen).parameters


def _needs_closure(chosen: type[torch.optim.Optimizer]) -> bool:
    closure = inspect.signature(chosen.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def _import(path: str) -> Any:
    module_name, _, name = path.rpartition(".")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(
            f"option optimizer = {path!r}: {module_name!r} cannot be imported: {error}",
            "give a dotted path such as torch.optim.Adagrad, importable from where you start phalanx",
        ) from error
    if not hasattr(module, name):
        classes = [n for n, member in vars(module).items() if isinstance(member, type)]
        raise ConfigError(f"option optimizer = {path!r}: {module_name} has no {name!r}", nearest(name, classes))
    return getattr(module, name)
