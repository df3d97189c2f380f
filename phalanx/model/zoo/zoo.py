"""From whatever the user calls a model to a specification, and from a specification to a module.

A model is a zoo name, a HuggingFace folder, a hub id in the local cache, a configuration, a module or a factory;
nothing here reaches the network or reads weights (`weights/` does). On the meta device a model of any size is built in
seconds: its parameters have shapes only, its buffers have their values, because no checkpoint holds them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
import transformers
from torch import nn
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

from phalanx.errors import ConfigError, ModelError, nearest
from phalanx.model.lora import Lora, add_adapters
from phalanx.model.zoo import zoo_table
from phalanx.model.zoo.configure import override, set_dropout, stop_layer_drop
from phalanx.model.zoo.configure import tiny as shrink
from phalanx.model.zoo.meta import parameters_on_meta, require_readable, require_real_buffers, twin
from phalanx.model.zoo.names import cached_folder, require_found

# Task → the auto class that builds it and transformers' table of model type → class name. The order is the order of
# preference for a configuration that does not name its own class.
_AUTO = {
    "speech-to-text": ("AutoModelForSpeechSeq2Seq", modeling_auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES),
    "text-to-text": ("AutoModelForSeq2SeqLM", modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES),
    "masked-lm": ("AutoModelForMaskedLM", modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES),
    "causal-lm": ("AutoModelForCausalLM", modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
    "image-classification": (
        "AutoModelForImageClassification",
        modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    ),
    "text-classification": (
        "AutoModelForSequenceClassification",
        modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    ),
}


@dataclass(frozen=True)
class ModelSpec:
    """What to build and for which task: from `factory` where there is one, else from `config`.

    `folder` is a local HuggingFace folder with weights, a tokenizer, or both.
    """

    name: str
    task: str
    config: PretrainedConfig | None
    folder: Path | None = None
    factory: Callable[[], nn.Module] | None = None
    lora: Lora | None = None  # adapters that are trained instead of the model


Model = str | Path | PretrainedConfig | nn.Module | Callable[[], nn.Module]


def resolve(
    model: Model,
    *,
    task: str | None = None,
    tiny: bool = False,
    overrides: Mapping[str, object] | None = None,
) -> ModelSpec:
    """Finds `model` without the network. `tiny` shrinks it to test size; `overrides` then set configuration values."""
    if task is not None and task not in zoo_table.TASKS:
        raise ConfigError(f"unknown task {task!r}; {nearest(task, zoo_table.TASKS)}")
    if isinstance(model, (str, Path)):
        name, config, folder, usual_task = _find(model)
    elif isinstance(model, PretrainedConfig):
        name, config, folder, usual_task = model.model_type, copy.deepcopy(model), None, None
    elif callable(model):
        return _resolve_custom(model, task, tiny, overrides)
    else:
        raise ModelError(
            f"an object of type {type(model).__name__} is not a model",
            hint="give a zoo name, a HuggingFace folder, a cached hub id, a configuration, a module or a factory",
        )
    if tiny:
        name, config, folder = f"{name}-tiny", shrink(config), None
    if overrides:
        config = override(config, overrides)
    task = _choose_task(name, config, task or usual_task)
    config.architectures = [_task_classes(config)[task]]
    return ModelSpec(name, task, config, folder)


def build(
    spec: ModelSpec,
    *,
    dtype: torch.dtype = torch.float32,
    device: Literal["cpu", "meta"] = "cpu",
    attention: str = "eager",
    dropout: float | None = None,
) -> nn.Module:
    """The module of `spec` in train mode (but for parts that the user put in eval mode), without a key/value cache and
    without layer dropping.

    On "meta" parameters have no storage while buffers are real and on the CPU. `attention` names the implementation
    for architectures that take one by name; those with attention classes of their own (GPT-Neo, GPT-J), like plain
    modules, keep theirs. A module that the user built shares its parameters with the result unless their dtype changes.
    """
    assert device in ("cpu", "meta"), device
    build_one = _build_custom if spec.factory is not None else _build_from_config
    model = build_one(spec, dtype, device, attention, dropout)
    if spec.lora is not None:
        with parameters_on_meta(enabled=device == "meta"):
            model = add_adapters(model, spec.lora)
    if device == "meta":
        require_real_buffers(model, spec.name)
    return _in_train_mode(model)


def _in_train_mode(model: nn.Module) -> nn.Module:
    """Parts that the user put in eval mode stay there; a module that is there as a whole was loaded, not frozen."""
    return model if any(part.training for part in model.modules()) else model.train()


def with_config(spec: ModelSpec) -> ModelSpec:
    """A factory's configuration is known only once it has run; tasks other than the user's own need one."""
    if spec.config is not None or spec.task == "custom":
        return spec
    assert spec.factory is not None
    with parameters_on_meta():
        made = getattr(spec.factory(), "config", None)
    if made is None:
        raise ConfigError(
            f"option task = {spec.task!r}: what {spec.name!r} makes has no HuggingFace configuration",
            "leave task out and give a dataset that yields the module's inputs",
        )
    return replace(spec, config=copy.deepcopy(made))


def _find(model: str | Path) -> tuple[str, PretrainedConfig, Path | None, str | None]:
    """Name, configuration, folder and usual task of a model given as text: a folder, else the zoo, else the cache.

    A zoo name is a hub id as well: where that is in the cache, its files are used.
    """
    require_found(model)
    path = Path(model).expanduser()
    if (path / "config.json").is_file():
        return path.resolve().name, _read_config(path), path, None
    entry = zoo_table.lookup(str(model))
    cached = (cached_folder(entry.name) if entry else None) or cached_folder(str(model))
    if cached is not None:
        return entry.name if entry else str(model), _read_config(cached), cached, entry.task if entry else None
    assert entry is not None, "it was found"
    fields = copy.deepcopy(dict(entry.fields))
    return entry.name, AutoConfig.for_model(entry.model_type, **fields), None, entry.task


def _read_config(folder: Path) -> PretrainedConfig:
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # a broken file can fail anywhere inside transformers
        raise ModelError(
            f"cannot read {str(folder / 'config.json')!r}: {str(error).strip() or type(error).__name__}",
            hint="the model type must be one that the installed transformers knows, without code of its own; "
            "otherwise build the module yourself and hand it over",
        ) from error


def _task_classes(config: PretrainedConfig) -> dict[str, str]:
    """The tasks this model type can be trained for, each with the class that does it."""
    classes = {}
    for task, (_, table) in _AUTO.items():
        if (known := table.get(config.model_type)) is not None:
            options = [known] if isinstance(known, str) else list(known)
            named = [option for option in options if option in (config.architectures or [])]
            classes[task] = (named or options)[0]
    return classes


def _choose_task(name: str, config: PretrainedConfig, task: str | None) -> str:
    classes = _task_classes(config)
    if not classes:
        raise ModelError(
            f"transformers has no class to train {name!r} (model type {config.model_type!r}) for any of "
            + ", ".join(_AUTO),
            hint="build the module yourself and hand it over",
        )
    if task is not None:
        if task not in classes:
            raise ModelError(
                f"{name!r} (model type {config.model_type!r}) cannot be trained for {task!r}; it has: "
                + ", ".join(classes),
                hint="choose one of these tasks, or another model",
            )
        return task
    for known, class_name in classes.items():
        if class_name in (config.architectures or []):
            return known
    # Encoders such as BERT also have a causal class, but only make sense for it when configured as decoders.
    if getattr(config, "is_decoder", False) and "causal-lm" in classes:
        return "causal-lm"
    return next(iter(classes))


def _resolve_custom(
    model: nn.Module | Callable[[], nn.Module], task: str | None, tiny: bool, overrides: Mapping[str, object] | None
) -> ModelSpec:
    if tiny or overrides:
        option = "tiny" if tiny else "overrides"
        raise ConfigError(
            f"{option} cannot act on a module or factory: only a configuration can be changed before building",
            hint="hand over module.config, or change the module yourself",
        )
    if not isinstance(model, nn.Module):
        return ModelSpec(getattr(model, "__name__", type(model).__name__), task or "custom", None, None, model)
    config = getattr(model, "config", None)
    config = config if isinstance(config, PretrainedConfig) else None
    name = type(model).__name__
    require_readable(model, name)
    if task is None:
        tasks = {class_name: task for task, class_name in _task_classes(config).items()} if config else {}
        task = tasks.get(name, "custom")
    return ModelSpec(name, task, config, None, lambda: model)


def _build_from_config(
    spec: ModelSpec, dtype: torch.dtype, device: str, attention: str, dropout: float | None
) -> nn.Module:
    assert spec.config is not None
    config = copy.deepcopy(spec.config)
    config.use_cache = False
    stop_layer_drop(config)
    if dropout is not None:
        set_dropout(config, dropout)
    auto_class = getattr(transformers, _AUTO[spec.task][0])

    def make(implementation: str) -> nn.Module:
        with parameters_on_meta(enabled=device == "meta"):
            return auto_class.from_config(
                config, dtype=dtype, attn_implementation=implementation, trust_remote_code=False
            )

    try:
        try:
            return make(attention)
        except KeyError as error:
            # Some architectures choose an attention class from a table of their own, which knows stock names only.
            if error.args != (attention,):
                raise
            return make("eager")
    except Exception as error:  # values that do not fit together fail anywhere inside the architecture's code
        raise ModelError(
            f"cannot build {spec.name!r} for {spec.task}: {str(error).strip() or type(error).__name__}",
            hint="check the configuration values, above all those you changed",
        ) from error


def _build_custom(spec: ModelSpec, dtype: torch.dtype, device: str, attention: str, dropout: float | None) -> nn.Module:
    assert spec.factory is not None
    if dropout is not None:
        raise ConfigError(
            f"dropout cannot be set on {spec.name!r}: the module is built by you",
            hint="set dropout in the module, or hand over a configuration",
        )
    with parameters_on_meta(enabled=device == "meta"):
        made = spec.factory()
    if not isinstance(made, nn.Module):
        raise ModelError(
            f"factory {spec.name!r} returned an object of type {type(made).__name__}",
            hint="a factory must return a torch.nn.Module",
        )
    model = twin(made, dtype, device, spec.name)
    for module in model.modules():
        if isinstance(vars(module).get("layerdrop"), float):
            vars(module)["layerdrop"] = 0.0
    if isinstance(model, PreTrainedModel):
        model.config.use_cache = False
        model.set_attn_implementation(attention)
    return model
