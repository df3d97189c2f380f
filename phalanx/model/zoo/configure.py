"""Changing a HuggingFace configuration without breaking it: overrides, dropout, layer dropping.

Values that were derived from a changed one (head size, per-layer lists) follow it, so that an override never leaves a
configuration half changed. What a test-sized configuration looks like is `tiny.py`'s business.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping

from huggingface_hub.errors import StrictDataclassError
from transformers import PretrainedConfig

from phalanx.errors import ConfigError, nearest

# The names under which architectures keep the length of a layer list.
DEPTHS = (
    "num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_encoder_layers", "num_decoder_layers",
    "encoder_layers", "decoder_layers",
)  # fmt: skip

# What architectures fill in by themselves when the user leaves it open.
_DERIVED: Mapping[str, Callable[[PretrainedConfig], int]] = {
    "num_key_value_heads": lambda config: config.num_attention_heads,
    "head_dim": lambda config: config.hidden_size // config.num_attention_heads,
    "word_embed_proj_dim": lambda config: config.hidden_size,
    "pooler_output_size": lambda config: config.hidden_size,
    "num_decoder_layers": lambda config: config.num_hidden_layers,
}

_DROPOUT = re.compile(r"(dropout|pdrop|drop_?out_(prob|rate|p))$")
_LAYER_DROP = re.compile(r"layer_?drop(_prob|_rate)?$")


def override(config: PretrainedConfig, changes: Mapping[str, object]) -> PretrainedConfig:
    """A copy of `config` with these attributes set and what is derived from them brought along."""
    changes = {config.attribute_map.get(name, name): value for name, value in _checked(config, changes).items()}
    changed = copy.deepcopy(config)
    try:
        for name, value in changes.items():
            setattr(changed, name, value)
        for name, value in _derived(config, changed).items():
            if name not in changes:
                setattr(changed, name, value)
        for name, value in _fitted_layers(config, changed).items():
            if name not in changes:
                setattr(changed, name, value)
        changed.validate()
    except (StrictDataclassError, ValueError, TypeError) as error:
        given = ", ".join(f"{name}={value!r}" for name, value in changes.items())
        raise ConfigError(
            f"{type(config).__name__} cannot take {given}: {_cause(error)}",
            hint="change the values together so that they agree",
        ) from error
    return changed


def layer_lists(config: PretrainedConfig) -> dict[str, list[object]]:
    """The lists that say, layer by layer, which kind of layer stands there."""
    depth = getattr(config, "num_hidden_layers", None)
    return {
        name: list(value)
        for name, value in vars(config).items()
        if "layer" in name and isinstance(value, (list, tuple)) and len(value) == depth
    }


def set_dropout(config: PretrainedConfig, probability: float) -> None:
    """Sets every dropout probability of `config` and its sub-configurations, in place."""
    if not 0.0 <= probability < 1.0:
        raise ConfigError(f"dropout is {probability}; allowed: 0 ≤ dropout < 1", hint="use 0 to switch dropout off")
    for part, name in _probabilities(config, _DROPOUT):
        setattr(part, name, probability)


def stop_layer_drop(config: PretrainedConfig) -> None:
    """Sets every probability of skipping whole layers to zero, in place: a plan needs to know what will run."""
    for part, name in _probabilities(config, _LAYER_DROP):
        setattr(part, name, 0.0)


def parts(config: PretrainedConfig) -> Iterator[PretrainedConfig]:
    """`config` and its sub-configurations, outer before inner."""
    yield config
    for key in config.sub_configs:
        inner = getattr(config, key, None)
        if isinstance(inner, PretrainedConfig):
            yield from parts(inner)


def _checked(config: PretrainedConfig, changes: Mapping[str, object]) -> Mapping[str, object]:
    known = {name for name in vars(config) if not name.startswith("_")} | set(config.attribute_map) | {"num_labels"}
    for name in changes:
        if name not in known:
            raise ConfigError(
                f"{type(config).__name__} has no attribute {name!r}; {nearest(name, known)}",
                hint="overrides take the names of the model's config.json",
            )
    return changes


def _derived(before: PretrainedConfig, after: PretrainedConfig) -> dict[str, int]:
    follow = {}
    for name, value_of in _DERIVED.items():
        if name in vars(before) and getattr(before, name) == value_of(before) != value_of(after):
            follow[name] = value_of(after)
    return follow


def _fitted_layers(before: PretrainedConfig, after: PretrainedConfig) -> dict[str, list[object]]:
    depth = getattr(after, "num_hidden_layers", None)
    if depth is None or depth == before.num_hidden_layers or depth < 1:
        return {}
    fitted = {
        name: [kinds[layer % len(kinds)] for layer in range(depth)] for name, kinds in layer_lists(before).items()
    }
    if hasattr(after, "attention_types") and "attention_layers" in fitted:
        fitted["attention_types"] = [[fitted["attention_layers"], 1]]
    return fitted


def _probabilities(config: PretrainedConfig, pattern: re.Pattern[str]) -> list[tuple[PretrainedConfig, str]]:
    return [
        (part, name)
        for part in parts(config)
        for name, value in vars(part).items()
        if pattern.search(name) and isinstance(value, (int, float)) and not isinstance(value, bool)
    ]


def _cause(error: BaseException) -> str:
    # The validators wrap the telling message in "Class validation error for validator ...".
    while error.__cause__ is not None:
        error = error.__cause__
    return " ".join(str(error).split())
