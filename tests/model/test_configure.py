"""Overrides change a configuration as a whole, or are refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig

from phalanx.errors import ConfigError
from phalanx.model.zoo.configure import override
from phalanx.model.zoo.zoo import build, resolve


def _message(error: pytest.ExceptionInfo[BaseException]) -> str:
    return str(error.value)


def test_overrides_set_attributes_under_either_of_their_names() -> None:
    for name in ("n_layer", "num_hidden_layers"):
        assert resolve("gpt2", overrides={name: 3}).config.n_layer == 3  # type: ignore[union-attr]


def test_overrides_act_after_tiny_and_set_the_number_of_labels() -> None:
    spec = resolve("google/vit-base-patch16-224-in21k", tiny=True, overrides={"num_hidden_layers": 6, "num_labels": 7})
    model = build(spec)
    assert len(model.get_submodule("vit.layers" if hasattr(model.vit, "layers") else "vit.encoder.layer")) == 6
    assert model.get_submodule("classifier").out_features == 7


@given(st.integers(min_value=1, max_value=64))
def test_lists_of_layer_kinds_follow_the_number_of_layers(depth: int) -> None:
    gemma = resolve("google/gemma-3-1b-it", overrides={"num_hidden_layers": depth}).config
    assert gemma is not None
    kinds = ["sliding_attention"] * 5 + ["full_attention"]
    assert gemma.layer_types[:26] == [kinds[layer % 6] for layer in range(min(depth, 26))]
    assert len(gemma.layer_types) == depth
    neo = resolve("EleutherAI/gpt-neo-2.7B", overrides={"num_layers": depth}).config
    assert neo is not None
    assert neo.attention_layers == [("global", "local")[layer % 2] for layer in range(depth)]
    assert neo.expand_attention_types_params(neo.attention_types) == neo.attention_layers


def test_derived_sizes_follow_but_explicit_ones_stay() -> None:
    followed = override(LlamaConfig(), {"hidden_size": 256, "num_attention_heads": 4})
    assert (followed.head_dim, followed.num_key_value_heads) == (64, 4)
    kept = override(resolve("Qwen/Qwen3-0.6B").config, {"hidden_size": 512})  # type: ignore[arg-type]
    assert (kept.head_dim, kept.num_key_value_heads) == (128, 8)


def test_an_unknown_override_names_the_nearest_attribute() -> None:
    with pytest.raises(ConfigError) as error:
        resolve("gpt2", overrides={"n_layers": 2})
    assert "GPT2Config has no attribute 'n_layers'; did you mean 'n_layer'" in _message(error)


@pytest.mark.parametrize("value", ["many", None])
def test_an_override_of_the_wrong_type_is_refused(value: object) -> None:
    with pytest.raises(ConfigError) as error:
        resolve("meta-llama/Llama-3.2-1B", overrides={"vocab_size": value})
    assert f"LlamaConfig cannot take vocab_size={value!r}" in _message(error) and "int" in _message(error)


def test_overrides_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ConfigError) as error:
        resolve("meta-llama/Llama-3.2-1B", overrides={"num_attention_heads": 33})
    assert "num_attention_heads=33" in _message(error) and "not a multiple" in _message(error)
