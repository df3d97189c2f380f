"""Tiny HuggingFace models straight from configurations, one per architecture that weights and exports must handle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf

_DECODER = dict(
    hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=99,
    pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
_GQA = dict(_DECODER, num_key_value_heads=2)
_HEAD_DIM = dict(_GQA, head_dim=8)

CONFIGS: dict[str, tuple[str, Callable[[], Any]]] = {
    "gpt2": ("GPT2LMHeadModel", lambda: hf.GPT2Config(
        n_embd=32, n_layer=2, n_head=4, vocab_size=99, n_positions=64, bos_token_id=1, eos_token_id=2)),
    "llama": ("LlamaForCausalLM", lambda: hf.LlamaConfig(**_GQA)),
    "bert": ("BertForMaskedLM", lambda: hf.BertConfig(**_DECODER)),
    "vit": ("ViTForImageClassification", lambda: hf.ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, image_size=16,
        patch_size=4, num_labels=5)),
    "t5": ("T5ForConditionalGeneration", lambda: hf.T5Config(
        d_model=32, d_ff=48, d_kv=8, num_layers=2, num_heads=4, vocab_size=99, pad_token_id=0,
        decoder_start_token_id=0)),
    "whisper": ("WhisperForConditionalGeneration", lambda: hf.WhisperConfig(
        d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=48, decoder_ffn_dim=48, vocab_size=99, num_mel_bins=8, max_source_positions=16,
        max_target_positions=32, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=3)),
    "mixtral": ("MixtralForCausalLM", lambda: hf.MixtralConfig(**_GQA, num_local_experts=4)),
    "opt": ("OPTForCausalLM", lambda: hf.OPTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, ffn_dim=48, vocab_size=99,
        max_position_embeddings=64, word_embed_proj_dim=32, pad_token_id=1, bos_token_id=2, eos_token_id=2)),
    "gpt_neo": ("GPTNeoForCausalLM", lambda: hf.GPTNeoConfig(
        hidden_size=32, num_layers=2, num_heads=4, vocab_size=99, max_position_embeddings=64,
        attention_types=[[["global", "local"], 1]], window_size=8, bos_token_id=1, eos_token_id=2)),
    "gptj": ("GPTJForCausalLM", lambda: hf.GPTJConfig(
        n_embd=32, n_layer=2, n_head=4, rotary_dim=4, vocab_size=99, n_positions=64, bos_token_id=1, eos_token_id=2)),
    "gemma3": ("Gemma3ForCausalLM", lambda: hf.Gemma3TextConfig(**_HEAD_DIM)),
    "electra": ("ElectraForMaskedLM", lambda: hf.ElectraConfig(**_DECODER, embedding_size=16)),
    "qwen3_moe": ("Qwen3MoeForCausalLM", lambda: hf.Qwen3MoeConfig(
        **_HEAD_DIM, moe_intermediate_size=24, num_experts=4, num_experts_per_tok=2)),
    "phi3": ("Phi3ForCausalLM", lambda: hf.Phi3Config(**_GQA)),
    "gpt_neox": ("GPTNeoXForCausalLM", lambda: hf.GPTNeoXConfig(**_DECODER)),
    "qwen3": ("Qwen3ForCausalLM", lambda: hf.Qwen3Config(**_HEAD_DIM)),
    "mistral": ("MistralForCausalLM", lambda: hf.MistralConfig(**_HEAD_DIM)),
    "gemma2": ("Gemma2ForCausalLM", lambda: hf.Gemma2Config(**_HEAD_DIM)),
}  # fmt: skip


def build(name: str) -> Any:
    """The model with its own random initialisation, in eval mode."""
    cls, config = CONFIGS[name]
    return getattr(hf, cls)._from_config(config(), attn_implementation="eager").eval()


def build_meta(name: str) -> Any:
    with torch.device("meta"):
        return build(name)


def logits(model: Any) -> torch.Tensor:
    ids = torch.arange(2 * 12).view(2, 12) % 90 + 4
    kind = model.config.model_type
    with torch.no_grad():
        if kind == "vit":
            return model(torch.linspace(-1, 1, 2 * 3 * 16 * 16).view(2, 3, 16, 16)).logits
        if kind == "whisper":
            return model(torch.linspace(-1, 1, 2 * 8 * 32).view(2, 8, 32), decoder_input_ids=ids).logits
        if kind == "t5":
            return model(input_ids=ids, decoder_input_ids=ids[:, :5]).logits
        return model(input_ids=ids).logits
