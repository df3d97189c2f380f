"""Test-sized configurations keep the structure of the originals, and really train."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    Gemma3TextConfig,
    LlamaConfig,
    LlavaConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen2Config,
    Qwen3MoeConfig,
)

from phalanx.model.zoo import zoo_table
from phalanx.model.zoo.configure import layer_lists, tiny
from phalanx.model.zoo.zoo import ModelSpec, build, resolve

# The shapes of GPT-3, TeraPipe and Oases differ from GPT-2's only in what tiny removes.
NAMES = [name for name in zoo_table.names() if not name.startswith(("gpt3", "terapipe", "oases"))]
KEPT_WORDS = ("dropout", "pdrop", "bias", "tie_", "act", "norm", "eps", "softcapping", "parallel", "type_vocab", "proj")


def _configs(name: str) -> tuple[PretrainedConfig, PretrainedConfig]:
    full, small = resolve(name).config, resolve(name, tiny=True).config
    assert full is not None and small is not None
    return full, small


def _batch(spec: ModelSpec) -> dict[str, torch.Tensor]:
    config = spec.config
    assert config is not None
    if spec.task == "image-classification":
        pixels = torch.randn(2, config.num_channels, config.image_size, config.image_size)
        return {"pixel_values": pixels, "labels": torch.tensor([0, 1])}
    tokens = torch.randint(3, 90, (2, 12))
    if spec.task == "speech-to-text":
        features = torch.randn(2, config.num_mel_bins, 2 * config.max_source_positions)
        return {"input_features": features, "labels": tokens}
    return {"input_ids": tokens, "labels": tokens}


@pytest.mark.parametrize("name", NAMES)
def test_every_tiny_model_trains(name: str) -> None:
    torch.manual_seed(0)
    spec = resolve(name, tiny=True)
    model = build(spec)
    assert sum(parameter.numel() for parameter in model.parameters()) < 500_000
    loss = model(**_batch(spec)).loss
    loss.backward()
    assert torch.isfinite(loss)
    idle = [path for path, p in model.named_parameters() if p.requires_grad and (p.grad is None or not p.grad.any())]
    # A bias on keys moves all scores of a query alike, which softmax does not see.
    assert [path for path in idle if "k_proj.bias" not in path and "key.bias" not in path] == []


@pytest.mark.parametrize("name", NAMES)
def test_heads_keep_their_ratio_and_parity(name: str) -> None:
    full, small = _configs(name)
    assert small.num_attention_heads % 2 == full.num_attention_heads % 2
    full_kv = getattr(full, "num_key_value_heads", None) or full.num_attention_heads
    small_kv = getattr(small, "num_key_value_heads", None) or small.num_attention_heads
    assert small.num_attention_heads * full_kv == full.num_attention_heads * small_kv
    assert (small_kv > 1) == (full_kv > 1)


@pytest.mark.parametrize("name", NAMES)
def test_sizes_are_small_and_stand_to_each_other_as_before(name: str) -> None:
    full, small = _configs(name)
    assert 32 <= small.hidden_size <= max(64, 4 * small.num_attention_heads)
    assert small.hidden_size % small.num_attention_heads == 0
    for wide in ("intermediate_size", "moe_intermediate_size", "embedding_size", "word_embed_proj_dim"):
        if (size := getattr(full, wide, None)) is not None:
            assert (getattr(small, wide) > small.hidden_size) == (size > full.hidden_size)
            assert (getattr(small, wide) == small.hidden_size) == (size == full.hidden_size)
    # DeepSeek's is the part of a head that turns with the position, T5's is free.
    if getattr(full, "head_dim", None) is not None and full.model_type not in ("t5", "deepseek_v3"):
        old, new = full.hidden_size / full.num_attention_heads, small.hidden_size / small.num_attention_heads
        assert (small.head_dim == new) == (full.head_dim == old)
        assert (small.head_dim > new) == (full.head_dim > old)


@pytest.mark.parametrize("name", [name for name in NAMES if "vit" not in name])
def test_the_vocabulary_keeps_its_parity_and_holds_every_special_token(name: str) -> None:
    full, small = _configs(name)
    assert 97 <= small.vocab_size <= 131 and small.vocab_size % 2 == full.vocab_size % 2
    special = [key for key in vars(full) if key.endswith("_token_id")]
    tokens: dict[object, object] = {}
    for key in special:
        before, after = getattr(full, key), getattr(small, key)
        assert type(before) is type(after)
        pairs = zip(before, after, strict=True) if isinstance(before, list) else [(before, after)]
        for old, new in pairs:
            assert new is None or 0 <= new < small.vocab_size
            assert tokens.setdefault(old, new) == new, "one token stays one token"
    assert len(set(tokens.values())) == len(tokens), "different tokens stay different"


@pytest.mark.parametrize("name", NAMES)
def test_every_kind_of_layer_appears_at_least_twice_among_at_least_four(name: str) -> None:
    full, small = _configs(name)
    for depth in ("num_hidden_layers", "encoder_layers", "decoder_layers", "num_decoder_layers"):
        assert getattr(small, depth, 4) >= 4
    for key, kinds in layer_lists(full).items():
        assert set(getattr(small, key)) == set(kinds)
        assert all(getattr(small, key).count(kind) >= 2 for kind in set(kinds))
        assert len(getattr(small, key)) == small.num_hidden_layers


@pytest.mark.parametrize("name", NAMES)
def test_biases_ties_dropout_activation_and_norms_are_kept(name: str) -> None:
    full, small = (config.to_dict() for config in _configs(name))
    sizes = ("word_embed_proj_dim", "classifier_proj_size")
    kept = [key for key in full if any(word in key for word in KEPT_WORDS) and key not in sizes]
    assert kept and {key: small[key] for key in kept} == {key: full[key] for key in kept}


@pytest.mark.parametrize("name", NAMES)
def test_positions_and_windows_suit_a_test_sequence(name: str) -> None:
    full, small = _configs(name)
    for limit in ("max_position_embeddings", "max_target_positions"):
        assert getattr(small, limit, 64) >= 64
    for window in ("sliding_window", "window_size"):
        if getattr(full, window, None) is not None:
            assert getattr(small, window) < 8


def test_gpt2_xl_keeps_an_odd_number_of_heads() -> None:
    assert _configs("gpt2-xl")[1].n_head == 5


def test_grouped_heads_keep_at_least_two_key_value_heads() -> None:
    small = _configs("meta-llama/Llama-3.2-1B")[1]
    assert (small.num_attention_heads, small.num_key_value_heads) == (8, 2)


def test_partial_rotary_embeddings_stay_partial() -> None:
    gptj, neox = _configs("gpt-j-6b")[1], _configs("pythia-1.4b")[1]
    assert gptj.rotary_dim * 4 == gptj.n_embd // gptj.n_head
    assert neox.rope_parameters["partial_rotary_factor"] == 0.25
    assert build(resolve("pythia-1.4b", tiny=True)).get_submodule("gpt_neox.rotary_emb").inv_freq.shape == (2,)


def test_a_partly_rotated_head_keeps_whole_pairs() -> None:
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75}
    small = tiny(Phi3Config(num_key_value_heads=4, rope_parameters=rope))
    assert (small.num_attention_heads, small.hidden_size) == (16, 128), "heads of 4 would rotate one and a half pairs"
    assert build(resolve(small))(input_ids=torch.zeros(1, 4, dtype=torch.long)).logits.shape[1] == 4


def test_llama_3_keeps_all_three_bands_of_its_rotary_scaling() -> None:
    frequencies = []
    for overrides in ({}, {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}):
        model = build(resolve("meta-llama/Llama-3.2-1B", tiny=True, overrides=overrides))
        frequencies.append(model.get_submodule("model.rotary_emb").inv_freq)
    ratio = frequencies[1] / frequencies[0]
    assert ratio[0] == 1 and 1 < ratio[2] < 32 and ratio[3].item() == pytest.approx(32)


def test_mixtures_have_four_experts_of_which_two_act() -> None:
    for name in ("mixtral-8x7b", "qwen3-30b-a3b"):
        small = _configs(name)[1]
        assert (small.num_local_experts, small.num_experts_per_tok) == (4, 2)


def test_t5_heads_are_independent_of_the_hidden_size() -> None:
    small = _configs("t5-small")[1]
    assert small.d_kv * small.num_heads != small.d_model and small.relative_attention_max_distance < 24


def test_whisper_and_vit_take_small_inputs() -> None:
    whisper, vit = _configs("whisper-small")[1], _configs("vit-base")[1]
    assert (whisper.max_source_positions, whisper.num_mel_bins) == (12, 8)
    assert (vit.image_size, vit.patch_size) == (12, 4)


def test_a_moved_special_token_meets_no_other() -> None:
    small = tiny(LlamaConfig(vocab_size=1000, pad_token_id=111, bos_token_id=110, eos_token_id=999))
    assert (small.pad_token_id, small.bos_token_id, small.eos_token_id) == (111, 110, 109)


def test_an_attention_scale_by_head_size_follows_the_head_size() -> None:
    followed, free = tiny(Gemma3TextConfig()), tiny(Gemma3TextConfig(query_pre_attn_scalar=144))
    assert followed.query_pre_attn_scalar == followed.head_dim and free.query_pre_attn_scalar == 144


def test_the_original_is_left_as_it_is() -> None:
    config = resolve("EleutherAI/gpt-neo-2.7B").config
    assert config is not None
    before = config.to_dict()
    tiny(config)
    assert config.to_dict() == before


@pytest.mark.parametrize("name", NAMES)
def test_shrinking_twice_changes_no_structure(name: str) -> None:
    once = _configs(name)[1]
    twice = tiny(once)
    assert (twice.hidden_size, twice.num_attention_heads) == (once.hidden_size, once.num_attention_heads)
    assert layer_lists(twice) == layer_lists(once)


def test_rotary_factors_are_cut_to_the_small_head() -> None:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "partial_rotary_factor": 1.0,
        "short_factor": [1.0] * 48,
        "long_factor": [2.0] * 48,
        "original_max_position_embeddings": 4096,
    }
    small = tiny(Phi3Config(rope_parameters=rope, max_position_embeddings=131072))
    assert len(small.rope_parameters["short_factor"]) == small.hidden_size // small.num_attention_heads // 2
    assert build(resolve(small))(input_ids=torch.zeros(1, 4, dtype=torch.long)).logits.shape[-1] == small.vocab_size


def test_layers_outside_the_zoo_keep_their_kinds_too() -> None:
    windowed = tiny(Qwen2Config(use_sliding_window=True, sliding_window=4096, max_window_layers=16))
    assert sorted(set(windowed.layer_types)) == ["full_attention", "sliding_attention"]
    assert windowed.sliding_window < 8
    dense = tiny(Qwen3MoeConfig(mlp_only_layers=[0, 1, 2]))
    assert dense.mlp_only_layers == [0, 2] and dense.num_hidden_layers == 4


def test_nested_configurations_are_shrunk_inside() -> None:
    small = tiny(LlavaConfig(text_config=LlamaConfig(num_key_value_heads=8)))
    assert (small.text_config.hidden_size, small.text_config.num_key_value_heads) == (64, 2)
    assert small.vision_config.hidden_size <= 64 and small.vision_config.num_hidden_layers == 4


@given(
    kv_heads=st.integers(1, 16),
    group=st.integers(1, 12),
    head_dim=st.sampled_from([None, 32, 64, 128, 256]),
    vocabulary=st.integers(200, 200_000),
)
def test_any_shape_shrinks_to_a_valid_one(kv_heads: int, group: int, head_dim: int | None, vocabulary: int) -> None:
    heads = kv_heads * group
    full = Gemma3TextConfig(
        hidden_size=heads * 96, num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=head_dim or 96,
        vocab_size=vocabulary, eos_token_id=vocabulary - 1, pad_token_id=0, bos_token_id=vocabulary - 2,
    )  # fmt: skip
    small = tiny(full)
    assert small.num_attention_heads * kv_heads == heads * small.num_key_value_heads
    assert small.num_attention_heads % 2 == heads % 2
    assert small.head_dim % 2 == 0 and small.vocab_size % 2 == vocabulary % 2
    assert len({small.eos_token_id, small.bos_token_id, small.pad_token_id}) == 3
