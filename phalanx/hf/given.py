"""What a Trainer is given, checked and completed: its class, its model, its collator, its smoothing of labels."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from torch import nn
from transformers import PreTrainedTokenizerBase
from transformers.data.data_collator import DataCollatorWithPadding, default_data_collator
from transformers.feature_extraction_sequence_utils import SequenceFeatureExtractor
from transformers.trainer_pt_utils import LabelSmoother

from phalanx.errors import ConfigError
from phalanx.state.adapters import has_own_adapters


def require_hooks(kind: type[Any], ours: type[Any]) -> None:
    """A method that a subclass overrides and nobody calls would silently do nothing."""
    own = {name for base in kind.__mro__[: kind.__mro__.index(ours)] for name in vars(base)}
    for name in sorted(own & set(vars(transformers.Trainer)) - set(vars(ours)) - {"__doc__", "__module__", "__init__"}):
        if not name.startswith("__"):
            raise ConfigError(
                f"{kind.__name__}.{name} overrides a method of transformers' Trainer that phalanx.hf.Trainer does not "
                "call",
                "override compute_loss, get_train_dataloader, get_eval_dataloader, create_optimizer, "
                "create_scheduler, evaluate or log; or write a loop of your own (docs/own_loop.md)",
            )


def initialised(model_init: Callable[[], nn.Module] | None) -> nn.Module:
    assert model_init is not None
    if any(each.default is inspect.Parameter.empty for each in inspect.signature(model_init).parameters.values()):
        raise ConfigError(
            "Trainer: model_init takes arguments, which are those of a hyperparameter search", "give one without"
        )
    return model_init()


def without_adapters(model: nn.Module) -> nn.Module:
    """Of a model that came with adapters of peft, the one they are for."""
    return cast(Any, model).get_base_model() if has_own_adapters(model) else model


def default_collator(processing_class: Any) -> Callable[[list[Any]], Mapping[str, Any]]:
    if isinstance(processing_class, PreTrainedTokenizerBase | SequenceFeatureExtractor):
        return DataCollatorWithPadding(cast(Any, processing_class))
    return default_data_collator


def smoother(args: transformers.TrainingArguments, model: nn.Module) -> LabelSmoother | None:
    problem = getattr(getattr(model, "config", None), "problem_type", None)
    if args.label_smoothing_factor and problem == "multi_label_classification":
        raise ConfigError(
            f"TrainingArguments: label_smoothing_factor = {args.label_smoothing_factor} does nothing for labels of "
            "which several hold",
            "leave it out",
        )
    return LabelSmoother(epsilon=args.label_smoothing_factor) if args.label_smoothing_factor else None


def dtype_of(model: nn.Module) -> torch.dtype:
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)


def saved(model: nn.Module, folder: Path) -> None:
    if hasattr(model, "save_pretrained"):
        model.save_pretrained(str(folder))  # pyright: ignore[reportCallIssue]
        return
    raise ConfigError(
        f"Trainer.save_model: {type(model).__name__} is no model of HuggingFace's, and nothing was trained yet",
        "call train() before, or save its state_dict() yourself",
    )
