"""Changing a HuggingFace configuration without breaking it: overrides, dropout, layer dropping, and down to test size.

Values that were derived from a changed one (head size, per-layer lists) follow it, so that an override never leaves a
configuration half changed. `tiny` shrinks any configuration with the same structure: kept are the ratio of heads to
key/value heads, odd counts, biases, ties, dropout, activation, norms, every kind of layer. It works on the names that
attributes have across architectures; what one architecture means by a name of its own stands in `_BY_MODEL_TYPE`.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, cast

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
        if "layer" in name and isinstance(value, (list, tuple)) and len(value) == depth and not _numbers_layers(value)
    }


def _numbers_layers(values: Iterable[object]) -> bool:
    """Names all layers by their indices instead of saying what each is."""
    return all(value == place for place, value in enumerate(values))


def set_dropout(config: PretrainedConfig, probability: float) -> None:
    """Sets every dropout probability of `config` and its sub-configurations, in place."""
    if not 0.0 <= probability < 1.0:
        raise ConfigError(f"dropout is {probability}; allowed: 0 ≤ dropout < 1", hint="use 0 to switch dropout off")
    for part, name in _probabilities(config, _DROPOUT):
        # Declared as int by some, of whom all but 0 is refused.
        whole = isinstance(getattr(part, name), int) and probability == 0
        try:
            setattr(part, name, 0 if whole else probability)
        except (StrictDataclassError, ValueError, TypeError) as error:
            raise ConfigError(
                f"{type(part).__name__} cannot take {name}={probability}: {_cause(error)}", hint="leave dropout out"
            ) from error


def stop_layer_drop(config: PretrainedConfig) -> None:
    """Sets every probability of skipping whole layers to zero, in place: a plan needs to know what will run."""
    for part, name in _probabilities(config, _LAYER_DROP):
        setattr(part, name, 0.0)


def layer_drop(config: PretrainedConfig) -> dict[str, float]:
    """The probabilities of skipping whole layers that `stop_layer_drop` would set to zero, by name."""
    return {name: value for part, name in _probabilities(config, _LAYER_DROP) if (value := getattr(part, name)) > 0}


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


_WIDTH = 64
_WINDOW = 5  # shorter than any test sequence
_POSITIONS = 128
_MIN_LAYERS = 4

_HIDDEN = ("hidden_size", "n_embd", "d_model", "dim", "emb_dim")
_HEADS = (
    "num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads", "encoder_attention_heads",
    "decoder_attention_heads", "num_encoder_attention_heads", "num_decoder_attention_heads",
)  # fmt: skip
_RELATIVE_TO_HIDDEN = (
    "intermediate_size", "n_inner", "ffn_dim", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim", "moe_intermediate_size",
    "shared_expert_intermediate_size", "embedding_size", "word_embed_proj_dim", "pooler_output_size",
    "classifier_proj_size", "hidden_dim", "intermediate_size_mlp", "ffn_hidden_size", "expert_ffn_hidden_size",
    "attention_hidden_size", "cross_attention_hidden_size", "entity_emb_size", "shared_intermediate_size",
    "block_ff_dim",
)  # fmt: skip
_AT_MOST: Mapping[str, int] = {
    "num_local_experts": 4,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "moe_top_k": 2,
    "num_experts_per_token": 2,
    "zero_expert_num": 2,
    "first_k_dense_replace": 2,
    "n_group": 2,
    "topk_group": 1,
    "entity_vocab_size": 32,
    "max_2d_position_embeddings": 32,
    "attention_chunk_size": 8,
    "index_topk": 8,
    "index_head_dim": 16,
    "index_n_heads": 4,
    "num_mel_bins": 8,
    "max_source_positions": 12,
    "sliding_window": _WINDOW,
    "relative_attention_num_buckets": 8,
    "num_buckets": 8,
    "relative_attention_max_distance": 16,
    "d_kv": 12,  # T5 chooses it freely: unequal to hidden / heads, so that nothing can rely on their being equal
}
_POSITION_LIMITS = (
    "max_position_embeddings", "n_positions", "max_target_positions", "original_max_position_embeddings", "max_seq_len",
    "context_length",
)  # fmt: skip
_PIXELS: Mapping[str, int] = {"image_size": 12, "patch_size": 4, "encoder_stride": 4}
_BY_MODEL_TYPE: Mapping[str, Mapping[str, object]] = {
    "gpt_neo": {"window_size": _WINDOW},
    "mpnet": {"relative_attention_num_buckets": 32},  # its code counts on these, whatever the configuration says
}


def tiny(config: PretrainedConfig) -> PretrainedConfig:
    """A copy of `config` small enough for a test on a CPU; `config` itself is left as it is."""
    small = copy.deepcopy(config)
    for key in config.sub_configs:
        if isinstance(inner := getattr(config, key, None), PretrainedConfig):
            setattr(small, key, tiny(inner))
    changes = {
        **_shape(config),
        **_layers(config),
        **_limits(config),
        **_stages(config),
        **_tokens(config, getattr(small.get_text_config(), "vocab_size", None)),
        **_BY_MODEL_TYPE.get(config.model_type, {}),
    }
    return override(small, {name: value for name, value in changes.items() if vars(config).get(name) is not None})


def _shape(config: PretrainedConfig) -> dict[str, object]:
    """Hidden size, heads, head size and everything measured against them."""
    hidden, heads = getattr(config, "hidden_size", None), getattr(config, "num_attention_heads", None)
    if not isinstance(hidden, int):
        return {}
    heads = heads if isinstance(heads, int) else 4  # as good as any for a model without them
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    small_heads, small_kv_heads = _head_counts(heads, kv_heads)
    per_head = _head_size(small_heads, [_rotary_fraction(rope) for rope in _ropes(_rope_settings(config))])
    small_hidden = small_heads * per_head
    old_head_dim = getattr(config, "head_dim", None) or hidden // heads
    head_dim = _relative(old_head_dim, hidden // heads, per_head, larger=2 * per_head)
    shape: dict[str, object] = {"num_key_value_heads": small_kv_heads, "head_dim": head_dim}
    shape |= dict.fromkeys(_HIDDEN, small_hidden) | dict.fromkeys(_HEADS, small_heads)
    if isinstance(rotary := getattr(config, "rotary_dim", None), int):
        shape["rotary_dim"] = max(2, rotary * head_dim // old_head_dim // 2 * 2)
    if getattr(config, "query_pre_attn_scalar", None) == old_head_dim:
        shape["query_pre_attn_scalar"] = head_dim
    if isinstance(getattr(config, "qk_rope_head_dim", None), int):
        shape |= _latent(config)
        head_dim = int(cast(int, shape["head_dim"]))
    if rope := _shortened_rope(config, head_dim):
        shape["rope_parameters"] = rope
    for name in _RELATIVE_TO_HIDDEN:
        if isinstance(size := getattr(config, name, None), int):
            shape[name] = _relative(size, hidden, small_hidden, larger=small_hidden * 3 // 2)
    return shape


def _stages(config: PretrainedConfig) -> dict[str, object]:
    """Models for images in stages, each twice as wide as the one before and on a quarter of its patches."""
    depths = getattr(config, "depths", None)
    if not isinstance(depths, list | tuple):
        return {}
    widths = [16 * 2**stage for stage in range(len(depths))]
    stages: dict[str, object] = {
        "depths": [2] * len(depths), "hidden_sizes": widths, "embed_dim": widths[0], "hidden_size": widths[-1],
        "image_size": _PIXELS["patch_size"] * 2 ** (len(depths) - 1),
    }  # fmt: skip
    if isinstance(getattr(config, "num_heads", None), list | tuple):  # attention in windows, which fit the last stage
        stages |= {"num_heads": [width // 8 for width in widths], "window_size": 2}
        stages["image_size"] = _PIXELS["patch_size"] * 2 ** len(depths)
    return stages


def _latent(config: PretrainedConfig) -> dict[str, int]:
    """Heads whose keys and values come from a common small vector: their rotated part, the rest, and the values."""
    rotated, rest = 8, 12
    known = {config.qk_rope_head_dim: rotated, getattr(config, "qk_head_dim", None): rotated + rest}
    return {
        "qk_rope_head_dim": rotated, "qk_nope_head_dim": rest, "qk_head_dim": rotated + rest, "v_head_dim": 16,
        "kv_lora_rank": 12, "q_lora_rank": 20, "head_dim": known.get(getattr(config, "head_dim", None), rotated),
    }  # fmt: skip


def _head_counts(heads: int, kv_heads: int) -> tuple[int, int]:
    """Fewer heads: an odd count stays odd, groups of query heads keep their size."""
    if heads == kv_heads:
        small = min(heads, 5 if heads % 2 else 4)
        return small, small
    if heads % kv_heads:
        return heads, kv_heads
    small_kv_heads = min(kv_heads, 3 if kv_heads % 2 else 2)
    return heads // kv_heads * small_kv_heads, small_kv_heads


def _head_size(heads: int, rotary_fractions: Iterable[float]) -> int:
    """The largest power of two that keeps the width, but at least one rotated pair in every rotary part."""
    size = 4
    while 2 * size * heads <= _WIDTH:
        size *= 2
    while any(int(size * fraction) < 2 or int(size * fraction) % 2 for fraction in rotary_fractions):
        size *= 2
    return size


def _relative(size: int, reference: int, small_reference: int, larger: int) -> int:
    """A size that stands to the small reference as the old one to the old reference: equal, larger or smaller."""
    if size == reference:
        return small_reference
    return larger if size > reference else small_reference // 2


def _ropes(settings: dict[str, Any]) -> list[dict[str, Any]]:
    """The rotary settings: one dictionary, or one for each kind of layer."""
    return [inner for inner in settings.values() if isinstance(inner, dict)] or [settings]


def _rope_settings(config: PretrainedConfig) -> dict[str, Any]:
    return copy.deepcopy(getattr(config, "rope_parameters", None) or {})


def _rotary_fraction(rope: dict[str, Any]) -> float:
    return float(rope.get("partial_rotary_factor") or 1.0)


def _shortened_rope(config: PretrainedConfig, head_dim: int) -> dict[str, Any]:
    """Rotary settings whose per-pair factors have as many entries as the small head has pairs."""
    settings = _rope_settings(config)
    for rope in _ropes(settings):
        pairs = int(head_dim * _rotary_fraction(rope)) // 2
        rope.update({name: value[:pairs] for name, value in rope.items() if isinstance(value, list)})
    return settings


def _layers(config: PretrainedConfig) -> dict[str, object]:
    """Four layers at least, and every kind of layer twice."""
    lists = layer_lists(config)
    kinds = list(dict.fromkeys(zip(*lists.values(), strict=True))) if lists else [()]
    repeats = max(2, -(-_MIN_LAYERS // len(kinds)))
    layers: dict[str, object] = dict.fromkeys(DEPTHS, repeats * len(kinds))
    layers |= {name: [kind[place] for kind in kinds] * repeats for place, name in enumerate(lists)}
    if "attention_layers" in layers:
        layers["attention_types"] = [[layers["attention_layers"], 1]]
    for name, value in vars(config).items():
        if "layer" in name and isinstance(value, (list, tuple)) and len(value) > 1 and _numbers_layers(value):
            layers[name] = list(range(repeats * len(kinds)))
    if getattr(config, "mlp_only_layers", None):
        layers["mlp_only_layers"] = [0, 2]
    return layers


def _limits(config: PretrainedConfig) -> dict[str, object]:
    at_most = dict(_AT_MOST)
    # A scaled rotary embedding is defined by its original and its present length: both stay, and cost nothing.
    if all(rope.get("rope_type", "default") == "default" for rope in _ropes(_rope_settings(config))):
        at_most |= dict.fromkeys(_POSITION_LIMITS, _POSITIONS)
    limits: dict[str, object] = {}
    for name, most in at_most.items():
        if isinstance(value := getattr(config, name, None), int):
            limits[name] = min(value, most)
    for name, pixels in _PIXELS.items():
        value = getattr(config, name, None)
        limits[name] = type(value)([pixels] * len(value)) if isinstance(value, (list, tuple)) else pixels
    return limits


def _tokens(config: PretrainedConfig, vocabulary: int | None) -> dict[str, object]:
    """A small vocabulary of the same parity, with the special tokens moved inside."""
    if vocabulary is None:
        return {}
    small = min(vocabulary, 101 if vocabulary % 2 else 112)
    special = {name: value for name, value in vars(config).items() if name.endswith("_token_id")}
    used = {token for value in special.values() for token in _as_list(value)}
    free = iter([token for token in reversed(range(small)) if token not in used])
    moved = {token: next(free) for token in sorted(used, reverse=True) if token >= small}
    tokens: dict[str, object] = {"vocab_size": small}
    if getattr(config, "decoder_vocab_size", None) == vocabulary:
        tokens["decoder_vocab_size"] = small
    for name, value in special.items():
        inside = [moved.get(token, token) for token in _as_list(value)]
        tokens[name] = inside if isinstance(value, list) else next(iter(inside), None)
    for name in ("suppress_tokens", "begin_suppress_tokens"):
        listed = _as_list(getattr(config, name, None))
        tokens[name] = [moved.get(token, token) for token in listed if token < small or token in moved]
    return tokens


def _as_list(value: object) -> list[int]:
    return [token for token in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(token, int)]
