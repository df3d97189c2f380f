"""The named models as plain data: hub name → architecture, task and the configuration fields that differ from defaults.

Importing it loads neither torch nor transformers, so listing and checking names is instant. It holds shapes, never
weights; `zoo.py` turns a row into a configuration and a model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

TASKS = (
    "causal-lm", "masked-lm", "text-classification", "image-classification", "speech-to-text", "text-to-text", "custom",
)  # fmt: skip


@dataclass(frozen=True)
class Entry:
    """One model of the zoo. `fields` are the arguments of its configuration class, as in the hub's config.json."""

    name: str
    model_type: str
    task: str
    fields: Mapping[str, object]


def names() -> list[str]:
    """Every zoo name, as the hub spells it, in the order of the table."""
    return list(_TABLE)


def lookup(name: str) -> Entry | None:
    """The entry with this hub name, alias or last part of a hub name, in any case; None when there is none."""
    found = _ALIASES.get(name.lower())
    return _TABLE[found] if found is not None else None


def _gpt2(layers: int, hidden: int, heads: int, tokens: int = 1024) -> dict[str, object]:
    return {"n_layer": layers, "n_embd": hidden, "n_head": heads, "n_positions": tokens}


def _gpt3(layers: int, hidden: int, heads: int) -> dict[str, object]:
    return _gpt2(layers, hidden, heads, tokens=2048)


def _oases(hidden: int) -> dict[str, object]:
    """Of its widths, the layers, heads and tokens of the example in Oases' README."""
    return _gpt2(24, hidden, hidden // 64) | {"vocab_size": 50304}


def _opt(layers: int, hidden: int, heads: int) -> dict[str, object]:
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "ffn_dim": 4 * hidden,
        "word_embed_proj_dim": hidden,
    }


def _decoder(layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, **fields: object) -> dict[str, object]:
    shape = {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": ffn,
    }
    return shape | fields


def _rope(theta: float, **fields: object) -> dict[str, object]:
    return {"rope_type": "default", "rope_theta": theta} | fields


def _llama3_rope(factor: float) -> dict[str, object]:
    return _rope(
        500000.0,
        rope_type="llama3",
        factor=factor,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    )


def _llama3(layers: int, hidden: int, heads: int, ffn: int, **fields: object) -> dict[str, object]:
    common = {"vocab_size": 128256, "rms_norm_eps": 1e-5, "bos_token_id": 128000, "eos_token_id": 128001}
    return _decoder(layers, hidden, heads, 8, ffn, **(common | fields))


def _qwen(layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, **fields: object) -> dict[str, object]:
    common = {"vocab_size": 151936, "rope_parameters": _rope(1000000.0), "bos_token_id": 151643, "eos_token_id": 151645}
    return _decoder(layers, hidden, heads, kv_heads, ffn, **(common | fields))


def _qwen3(layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, **fields: object) -> dict[str, object]:
    common = {"head_dim": 128, "max_position_embeddings": 40960, "max_window_layers": layers}
    return _qwen(layers, hidden, heads, kv_heads, ffn, **(common | fields))


def _neox(layers: int, hidden: int, heads: int, vocabulary: int, activation: str) -> dict[str, object]:
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "intermediate_size": 4 * hidden,
        "vocab_size": vocabulary,
        "hidden_act": activation,
        "max_position_embeddings": 2048,
        "rope_parameters": _rope(10000.0, partial_rotary_factor=0.25),
        "bos_token_id": 0,
        "eos_token_id": 0,
    }


_GPT_NEO_27B = {
    "num_layers": 32,
    "hidden_size": 2560,
    "num_heads": 20,
    "attention_types": [[["global", "local"], 16]],
    "window_size": 256,
    "max_position_embeddings": 2048,
}

_WHISPER_SMALL = {
    "d_model": 768,
    "encoder_layers": 12,
    "decoder_layers": 12,
    "encoder_attention_heads": 12,
    "decoder_attention_heads": 12,
    "encoder_ffn_dim": 3072,
    "decoder_ffn_dim": 3072,
    "vocab_size": 51865,
    "num_mel_bins": 80,
    "max_source_positions": 1500,
    "max_target_positions": 448,
    "bos_token_id": 50257,
    "eos_token_id": 50257,
    "pad_token_id": 50257,
    "decoder_start_token_id": 50258,
    "begin_suppress_tokens": [220, 50257],
}

_ELECTRA_BASE_GENERATOR = {
    "embedding_size": 768,
    "hidden_size": 256,
    "num_hidden_layers": 12,
    "num_attention_heads": 4,
    "intermediate_size": 1024,
    "vocab_size": 30522,
}

_GEMMA2_2B = _decoder(
    26, 2304, 8, 4, 9216,
    head_dim=256, vocab_size=256000, max_position_embeddings=8192, sliding_window=4096,
    query_pre_attn_scalar=256, attn_logit_softcapping=50.0, final_logit_softcapping=30.0,
    rope_parameters=_rope(10000.0),
)  # fmt: skip

_GEMMA3_1B = _decoder(
    26, 1152, 4, 1, 6912,
    head_dim=256, vocab_size=262144, max_position_embeddings=32768, sliding_window=512,
    query_pre_attn_scalar=256, eos_token_id=[1, 106],
    rope_parameters={"full_attention": _rope(1000000.0), "sliding_attention": _rope(10000.0)},
)  # fmt: skip

_PHI3_MINI_4K = _decoder(
    32, 3072, 32, 32, 8192,
    vocab_size=32064, max_position_embeddings=4096, original_max_position_embeddings=4096, sliding_window=2047,
    rope_parameters=_rope(10000.0, partial_rotary_factor=1.0),
)  # fmt: skip

_MIXTRAL_8X7B = _decoder(
    32, 4096, 32, 8, 14336,
    num_local_experts=8, num_experts_per_tok=2, router_aux_loss_coef=0.02, max_position_embeddings=32768,
    rope_parameters=_rope(1000000.0),
)  # fmt: skip

_QWEN25_05B = _qwen(24, 896, 14, 2, 4864, tie_word_embeddings=True, max_window_layers=24, eos_token_id=151643)

_QWEN3_30B_A3B = _qwen3(
    48, 2048, 32, 4, 6144,
    moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8, norm_topk_prob=True,
)  # fmt: skip

_DEEPSEEK_V3 = _decoder(
    61, 7168, 128, 128, 18432,
    vocab_size=129280, max_position_embeddings=163840, bos_token_id=0, eos_token_id=1,
    moe_intermediate_size=2048, n_routed_experts=256, num_experts_per_tok=8, n_shared_experts=1,
    first_k_dense_replace=3, n_group=8, topk_group=4, routed_scaling_factor=2.5, norm_topk_prob=True,
    q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
    rope_parameters=_rope(
        10000.0, rope_type="yarn", factor=40.0, original_max_position_embeddings=4096,
        beta_fast=32.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0,
    ),
)  # fmt: skip

_FLAN_T5_BASE = {
    "d_model": 768,
    "d_ff": 2048,
    "num_layers": 12,
    "num_decoder_layers": 12,
    "num_heads": 12,
    "feed_forward_proj": "gated-gelu",
    "tie_word_embeddings": False,
    "decoder_start_token_id": 0,
}

# A byte-level vocabulary: the 256 bytes and three special tokens.
_DEMO = _decoder(
    4, 256, 4, 2, 704,
    vocab_size=259, max_position_embeddings=1024, tie_word_embeddings=True,
    bos_token_id=256, eos_token_id=257, pad_token_id=258,
)  # fmt: skip

_ROWS: tuple[tuple[str, str, str, Mapping[str, object]], ...] = (
    ("gpt2", "gpt2", "causal-lm", _gpt2(12, 768, 12)),
    ("gpt2-medium", "gpt2", "causal-lm", _gpt2(24, 1024, 16)),
    ("gpt2-large", "gpt2", "causal-lm", _gpt2(36, 1280, 20)),
    ("gpt2-xl", "gpt2", "causal-lm", _gpt2(48, 1600, 25)),
    ("EleutherAI/gpt-neo-2.7B", "gpt_neo", "causal-lm", _GPT_NEO_27B),
    ("EleutherAI/gpt-j-6b", "gptj", "causal-lm", {**_gpt2(28, 4096, 16, 2048), "rotary_dim": 64, "vocab_size": 50400}),
    ("bert-base-cased", "bert", "masked-lm", {"vocab_size": 28996}),
    ("facebook/opt-6.7b", "opt", "causal-lm", _opt(32, 4096, 32)),
    ("facebook/opt-13b", "opt", "causal-lm", _opt(40, 5120, 40)),
    (
        "meta-llama/Llama-2-13b-chat-hf", "llama", "causal-lm",
        _decoder(40, 5120, 40, 40, 13824, max_position_embeddings=4096, rms_norm_eps=1e-5),
    ),
    (
        "meta-llama/Meta-Llama-3-8B", "llama", "causal-lm",
        _llama3(32, 4096, 32, 14336, max_position_embeddings=8192, rope_parameters=_rope(500000.0)),
    ),
    (
        "meta-llama/Llama-3.2-1B", "llama", "causal-lm",
        _llama3(
            16, 2048, 32, 8192,
            head_dim=64, max_position_embeddings=131072, rope_parameters=_llama3_rope(32.0), tie_word_embeddings=True,
        ),
    ),
    (
        "meta-llama/Llama-3.3-70B-Instruct", "llama", "causal-lm",
        _llama3(
            80, 8192, 64, 28672,
            head_dim=128, max_position_embeddings=131072, rope_parameters=_llama3_rope(8.0),
            eos_token_id=[128001, 128008, 128009],
        ),
    ),
    (
        "meta-llama/Llama-3.1-405B", "llama", "causal-lm",
        _llama3(
            126, 16384, 128, 53248,
            head_dim=128, max_position_embeddings=131072, rope_parameters=_llama3_rope(8.0),
        ),
    ),
    ("openai/whisper-small", "whisper", "speech-to-text", _WHISPER_SMALL),
    ("google/electra-base-generator", "electra", "masked-lm", _ELECTRA_BASE_GENERATOR),
    ("google/vit-base-patch16-224-in21k", "vit", "image-classification", {"image_size": 224, "patch_size": 16}),
    ("Qwen/Qwen2.5-0.5B", "qwen2", "causal-lm", _QWEN25_05B),
    ("Qwen/Qwen3-0.6B", "qwen3", "causal-lm", _qwen3(28, 1024, 16, 8, 3072, tie_word_embeddings=True)),
    ("Qwen/Qwen3-8B", "qwen3", "causal-lm", _qwen3(36, 4096, 32, 8, 12288)),
    (
        "mistralai/Mistral-7B-v0.1", "mistral", "causal-lm",
        _decoder(
            32, 4096, 32, 8, 14336,
            max_position_embeddings=32768, rms_norm_eps=1e-5, sliding_window=4096, rope_parameters=_rope(10000.0),
        ),
    ),
    ("google/gemma-2-2b", "gemma2", "causal-lm", _GEMMA2_2B),
    ("google/gemma-3-1b-it", "gemma3_text", "causal-lm", _GEMMA3_1B),
    ("microsoft/Phi-3-mini-4k-instruct", "phi3", "causal-lm", _PHI3_MINI_4K),
    ("EleutherAI/pythia-1.4b", "gpt_neox", "causal-lm", _neox(24, 2048, 16, 50304, "gelu")),
    ("EleutherAI/gpt-neox-20b", "gpt_neox", "causal-lm", _neox(44, 6144, 64, 50432, "gelu_fast")),
    ("google-t5/t5-small", "t5", "text-to-text", {"decoder_start_token_id": 0}),
    ("google/flan-t5-base", "t5", "text-to-text", _FLAN_T5_BASE),
    ("mistralai/Mixtral-8x7B-v0.1", "mixtral", "causal-lm", _MIXTRAL_8X7B),
    ("deepseek-ai/DeepSeek-V3", "deepseek_v3", "causal-lm", _DEEPSEEK_V3),
    ("Qwen/Qwen3-30B-A3B", "qwen3_moe", "causal-lm", _QWEN3_30B_A3B),
    ("gpt3-125m", "gpt2", "causal-lm", _gpt3(12, 768, 12)),
    ("gpt3-350m", "gpt2", "causal-lm", _gpt3(24, 1024, 16)),
    ("gpt3-760m", "gpt2", "causal-lm", _gpt3(24, 1536, 16)),
    # The paper prints 24 heads of 128 here and a width of 5140 for 13B; neither multiplies out, these do.
    ("gpt3-1.3b", "gpt2", "causal-lm", _gpt3(24, 2048, 16)),
    ("gpt3-2.7b", "gpt2", "causal-lm", _gpt3(32, 2560, 32)),
    ("gpt3-6.7b", "gpt2", "causal-lm", _gpt3(32, 4096, 32)),
    ("gpt3-13b", "gpt2", "causal-lm", _gpt3(40, 5120, 40)),
    ("gpt3-175b", "gpt2", "causal-lm", _gpt3(96, 12288, 96)),
    ("terapipe-1b", "gpt2", "causal-lm", _gpt3(24, 2048, 16)),
    ("terapipe-13b", "gpt2", "causal-lm", _gpt3(40, 5120, 40)),
    ("terapipe-44b", "gpt2", "causal-lm", _gpt3(96, 6144, 48)),
    ("terapipe-175b", "gpt2", "causal-lm", _gpt3(96, 12288, 96)),
    ("oases-1024", "gpt2", "causal-lm", _oases(1024)),
    ("oases-2048", "gpt2", "causal-lm", _oases(2048)),
    ("oases-3072", "gpt2", "causal-lm", _oases(3072)),
    ("oases-4096", "gpt2", "causal-lm", _oases(4096)),
    ("oases-6144", "gpt2", "causal-lm", _oases(6144)),
    ("oases-8192", "gpt2", "causal-lm", _oases(8192)),
    ("oases-12288", "gpt2", "causal-lm", _oases(12288)),
    ("phalanx-demo", "llama", "causal-lm", _DEMO),
)  # fmt: skip

_OTHER_NAMES = {
    "openai-community/gpt2": "gpt2",
    "openai-community/gpt2-medium": "gpt2-medium",
    "openai-community/gpt2-large": "gpt2-large",
    "openai-community/gpt2-xl": "gpt2-xl",
    "google-bert/bert-base-cased": "bert-base-cased",
    "opt-13.7b": "facebook/opt-13b",
    "facebook/opt-13.7b": "facebook/opt-13b",
    "llama-3-8b": "meta-llama/Meta-Llama-3-8B",
    "llama-2-13b": "meta-llama/Llama-2-13b-chat-hf",
    "llama-3.1-405b": "meta-llama/Llama-3.1-405B",
    "llama-3.3-70b": "meta-llama/Llama-3.3-70B-Instruct",
    "gpt-j": "EleutherAI/gpt-j-6b",
    "vit-base": "google/vit-base-patch16-224-in21k",
    "mistral-7b": "mistralai/Mistral-7B-v0.1",
    "gemma-3-1b": "google/gemma-3-1b-it",
    "phi-3-mini": "microsoft/Phi-3-mini-4k-instruct",
    "mixtral-8x7b": "mistralai/Mixtral-8x7B-v0.1",
}

_TABLE = {name: Entry(name, model_type, task, fields) for name, model_type, task, fields in _ROWS}
_ALIASES = (
    {name.rsplit("/", 1)[-1].lower(): name for name in _TABLE}
    | {name.lower(): name for name in _TABLE}
    | {alias.lower(): name for alias, name in _OTHER_NAMES.items()}
)
