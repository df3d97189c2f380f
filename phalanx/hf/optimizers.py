"""Transformers' optimizers and schedules over what a rank updates: the same groups, the same names, the same rates."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any, cast

import torch
import transformers
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from transformers.optimization import get_scheduler
from transformers.trainer_optimizer import is_optimizer_factory
from transformers.trainer_pt_utils import get_parameter_names

from phalanx.errors import ConfigError
from phalanx.own_loop.session import OwnSession

_NOT_DECAYED = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]


def decayed_names(model: nn.Module) -> list[str]:
    """All but biases and the weights of norms, as transformers has it."""
    return get_parameter_names(model, [nn.LayerNorm], _NOT_DECAYED)


def make_optimizer(
    session: OwnSession, args: transformers.TrainingArguments, decayed: Iterable[str], model: nn.Module,
    chosen: tuple[type[torch.optim.Optimizer], dict[str, Any]] | None,
) -> torch.optim.Optimizer:  # fmt: skip
    """chosen: a class and its arguments, instead of those that `args.optim` names."""
    kind, arguments = chosen or transformers.Trainer.get_optimizer_cls_and_kwargs(args, cast(Any, model))
    own = {"params", "model", "optimizer_dict"} & arguments.keys()
    if own or is_optimizer_factory(kind):
        named = getattr(args.optim, "value", args.optim)
        raise ConfigError(
            f"TrainingArguments: optim = {named!r} looks for its parameters in the module, which a plan splits",
            "choose one that takes a list of parameters, such as adamw_torch, adafactor or sgd; or give "
            "optimizer_cls_and_kwargs=(class, arguments)",
        )
    names = set(decayed)
    named = list(session.named_parameters())
    groups = [
        {"params": [tensor for name, tensor in named if name in names], "weight_decay": args.weight_decay},
        {"params": [tensor for name, tensor in named if name not in names], "weight_decay": 0.0},
    ]
    return kind(groups, **arguments)


def like(given: torch.optim.Optimizer, model: nn.Module, session: OwnSession) -> torch.optim.Optimizer:
    """An optimizer that the user made of the model's parameters, made of what this rank updates of them."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    mine = dict(session.named_parameters())
    if given.state:
        raise ConfigError(
            f"optimizers: {type(given).__name__} has made steps already", "give a new one, or resume from a checkpoint"
        )
    groups: list[dict[str, Any]] = []
    for group in given.param_groups:
        unknown = [p for p in group["params"] if id(p) not in names]
        if unknown:
            raise ConfigError(
                f"optimizers: {type(given).__name__} updates a tensor of shape {list(unknown[0].shape)} that is no "
                "parameter of the model",
                "make it of model.parameters(), of the model that the Trainer is given",
            )
        own: list[Tensor] = [mine[names[id(p)]] for p in group["params"] if names[id(p)] in mine]
        groups.append({**group, "params": own})
    taken = inspect.signature(type(given)).parameters
    return type(given)(groups, **{name: value for name, value in given.defaults.items() if name in taken})


def follow(optimizer: torch.optim.Optimizer, given: torch.optim.Optimizer) -> None:
    """A scheduler that the user made moves the rates of the optimizer it was made for."""
    for mine, theirs in zip(optimizer.param_groups, given.param_groups, strict=True):
        mine.update({name: value for name, value in theirs.items() if name != "params"})


def make_scheduler(
    optimizer: torch.optim.Optimizer, args: transformers.TrainingArguments, steps: int
) -> LRScheduler | ReduceLROnPlateau:
    return get_scheduler(
        args.lr_scheduler_type, optimizer=optimizer, num_warmup_steps=args.get_warmup_steps(steps),
        num_training_steps=steps, scheduler_specific_kwargs=cast(dict[str, Any] | None, args.lr_scheduler_kwargs),
    )  # fmt: skip


def waits_for_metrics(scheduler: Any) -> bool:
    """Whether it is moved by evaluations, not by steps."""
    return isinstance(scheduler, ReduceLROnPlateau) or type(scheduler).__name__ == "GreedyLR"


def learning_rate(optimizer: torch.optim.Optimizer) -> float:
    return float(optimizer.param_groups[0]["lr"])
