"""The architectures that parity is proven for."""

from __future__ import annotations

# One name per architecture, and per variant of one that changes its graph (odd heads, ties, key/value sharing, gates).
ARCHITECTURES = [
    "gpt2-xl", "EleutherAI/gpt-neo-2.7B", "EleutherAI/gpt-j-6b", "facebook/opt-6.7b", "bert-base-cased",
    "google/electra-base-generator", "google/vit-base-patch16-224-in21k", "openai/whisper-small", "google-t5/t5-small",
    "google/flan-t5-base", "meta-llama/Llama-2-13b-chat-hf", "meta-llama/Llama-3.2-1B",
    "meta-llama/Llama-3.3-70B-Instruct", "Qwen/Qwen2.5-0.5B", "Qwen/Qwen3-0.6B", "mistralai/Mistral-7B-v0.1",
    "google/gemma-2-2b", "google/gemma-3-1b-it", "microsoft/Phi-3-mini-4k-instruct", "EleutherAI/pythia-1.4b",
    "mistralai/Mixtral-8x7B-v0.1", "Qwen/Qwen3-30B-A3B",
]  # fmt: skip
