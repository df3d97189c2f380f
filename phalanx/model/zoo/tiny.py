"""Shrinks any HuggingFace configuration to test size with the same structure.

Kept: the ratio of heads to key/value heads, odd counts, biases, ties, dropout, activation, norms, every kind of layer.
It works on the names attributes have across architectures; what one architecture means by a name of its own stands in
`_BY_MODEL_TYPE`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

from transformers import PretrainedConfig

from phalanx.model.zoo.configure import DEPTHS, layer_lists, override

_WIDTH = 64
_WINDOW = 5  # shorter than any test sequence
_POSITIONS = 128
_MIN_LAYERS = 4

_HIDDEN = ("hidden_size", "n_embd", "d_model")
_HEADS = ("num_attention_heads", "n_head", "num_heads", "encoder_attention_heads", "decoder_attention_heads")
_RELATIVE_TO_HIDDEN = (
    "intermediate_size", "n_inner", "ffn_dim", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim", "moe_intermediate_size",
    "shared_expert_intermediate_size", "embedding_size", "word_embed_proj_dim", "pooler_output_size",
    "classifier_proj_size",
)  # fmt: skip
_AT_MOST: Mapping[str, int] = {
    "num_local_experts": 4,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 2,
    "num_mel_bins": 8,
    "max_source_positions": 12,
    "sliding_window": _WINDOW,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 16,
    "d_kv": 12,  # T5 chooses it freely: unequal to hidden / heads, so that nothing can rely on their being equal
}
_POSITION_LIMITS = (
    "max_position_embeddings", "n_positions", "max_target_positions", "original_max_position_embeddings",
)  # fmt: skip
_PIXELS: Mapping[str, int] = {"image_size": 12, "patch_size": 4, "encoder_stride": 4}
_BY_MODEL_TYPE: Mapping[str, Mapping[str, object]] = {"gpt_neo": {"window_size": _WINDOW}}


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
        **_tokens(config, getattr(small.get_text_config(), "vocab_size", None)),
        **_BY_MODEL_TYPE.get(config.model_type, {}),
    }
    return override(small, {name: value for name, value in changes.items() if vars(config).get(name) is not None})


def _shape(config: PretrainedConfig) -> dict[str, object]:
    """Hidden size, heads, head size and everything measured against them."""
    hidden, heads = getattr(config, "hidden_size", None), getattr(config, "num_attention_heads", None)
    if not isinstance(hidden, int) or not isinstance(heads, int):
        return {}
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
    if rope := _shortened_rope(config, head_dim):
        shape["rope_parameters"] = rope
    for name in _RELATIVE_TO_HIDDEN:
        if isinstance(size := getattr(config, name, None), int):
            shape[name] = _relative(size, hidden, small_hidden, larger=small_hidden * 3 // 2)
    return shape


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
    for name, value in special.items():
        inside = [moved.get(token, token) for token in _as_list(value)]
        tokens[name] = inside if isinstance(value, list) else next(iter(inside), None)
    for name in ("suppress_tokens", "begin_suppress_tokens"):
        listed = _as_list(getattr(config, name, None))
        tokens[name] = [moved.get(token, token) for token in listed if token < small or token in moved]
    return tokens


def _as_list(value: object) -> list[int]:
    return [token for token in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(token, int)]
