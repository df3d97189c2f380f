"""The architectures that parity is proven for, and tables of them with plans."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import pytest

from phalanx.model.zoo import zoo_table

# One name per architecture, and per variant of one that changes its graph (odd heads, ties, key/value sharing, gates).
ARCHITECTURES = [
    "gpt2-xl", "EleutherAI/gpt-neo-2.7B", "EleutherAI/gpt-j-6b", "facebook/opt-6.7b", "bert-base-cased",
    "google/electra-base-generator", "google/vit-base-patch16-224-in21k", "openai/whisper-small", "google-t5/t5-small",
    "google/flan-t5-base", "meta-llama/Llama-2-13b-chat-hf", "meta-llama/Llama-3.2-1B",
    "meta-llama/Llama-3.3-70B-Instruct", "Qwen/Qwen2.5-0.5B", "Qwen/Qwen3-0.6B", "mistralai/Mistral-7B-v0.1",
    "google/gemma-2-2b", "google/gemma-3-1b-it", "microsoft/Phi-3-mini-4k-instruct", "EleutherAI/pythia-1.4b",
    "mistralai/Mixtral-8x7B-v0.1", "Qwen/Qwen3-30B-A3B", "deepseek-ai/DeepSeek-V3",
]  # fmt: skip
(
    GPT2, NEO, GPTJ, OPT, BERT, ELECTRA, VIT, WHISPER, T5, FLAN_T5, LLAMA2, LLAMA, LLAMA_70B, QWEN2, QWEN3, MISTRAL,
    GEMMA2, GEMMA3, PHI3, PYTHIA, MIXTRAL, QWEN3_MOE, DEEPSEEK,
) = ARCHITECTURES  # fmt: skip

_TASKS = {name: entry.task for name in ARCHITECTURES if (entry := zoo_table.lookup(name))}
DECODERS = [name for name in ARCHITECTURES if _TASKS[name] == "causal-lm"]
TWO_STACKS = [name for name in ARCHITECTURES if _TASKS[name] in ("speech-to-text", "text-to-text")]
TAKES_PADDING = [name for name in ARCHITECTURES if _TASKS[name] != "image-classification"]

long = pytest.mark.long


def rows(names: Iterable[str], quick: Iterable[str]) -> list[object]:
    """Every name. All are long but the quick ones."""
    chosen = set(quick)
    return [pytest.param(name, marks=() if name in chosen else (long,)) for name in names]


def table(names: Iterable[str], plans: Iterable[str], quick: Mapping[str, str]) -> list[object]:
    """Every pair of an architecture and a plan. All are long but those of `quick`: plan → architecture."""
    names, plans = list(names), list(plans)
    assert set(quick) <= set(plans) and set(quick.values()) <= set(names)
    return [
        pytest.param(name, plan, marks=() if quick.get(plan) == name else (long,), id=f"{name}-{plan}")
        for name in names
        for plan in plans
    ]
