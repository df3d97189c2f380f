"""The families of transformers that robustness is tried on: model types of its auto classes, by task."""

from __future__ import annotations

from collections.abc import Mapping

_BY_TASK: Mapping[str, tuple[str, ...]] = {
    "causal-lm": (
        "gpt2", "llama", "gpt_oss", "llama4_text", "deepseek_v2", "deepseek_v3", "falcon", "mpt", "xglm", "mistral",
        "mixtral", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "gemma", "gemma2", "gemma3_text", "phi", "phi3",
        "gpt_neo", "gptj", "gpt_neox", "gpt_bigcode", "codegen", "opt", "bloom", "biogpt", "olmo", "olmo2", "olmoe",
        "stablelm", "starcoder2", "cohere", "cohere2", "granite", "granitemoe", "glm", "glm4", "helium", "nemotron",
        "persimmon", "smollm3", "exaone4", "ernie4_5", "diffllama", "doge", "arcee", "apertus", "seed_oss", "ctrl",
        "openai-gpt", "minicpm3", "mamba", "jamba", "rwkv", "qwen3_next",
    ),
    "masked-lm": (
        "bert", "roberta", "modernbert", "distilbert", "albert", "electra", "deberta", "deberta-v2", "xlm-roberta",
        "camembert", "mpnet", "convbert", "megatron-bert", "rembert", "roformer", "squeezebert", "nystromformer",
        "mobilebert", "eurobert", "nomic_bert", "layoutlm", "fnet", "big_bird", "longformer", "funnel", "yoso",
    ),
    "text-classification": ("ernie", "data2vec-text", "roberta-prelayernorm", "xlm-roberta-xl"),
    "image-classification": (
        "vit", "deit", "beit", "dinov2", "ijepa", "vit_msn", "siglip", "clip", "convnext", "swin", "resnet",
    ),
    "speech-to-text": ("whisper", "moonshine"),
    "text-to-text": (
        "t5", "mt5", "umt5", "bart", "mbart", "marian", "pegasus", "blenderbot", "blenderbot-small", "m2m_100",
        "plbart", "t5gemma", "longt5", "switch_transformers", "led", "prophetnet",
    ),
}  # fmt: skip

# model type → task
FAMILIES: Mapping[str, str] = {family: task for task, families in _BY_TASK.items() for family in families}

# What configuration classes leave open although their models need it.
MISSING: Mapping[str, object] = {
    "pad_token_id": 0,
    "num_experts_per_tok": 2,
    "n_routed_experts": 4,
    "vocab_size": 99,
}

# What single families need: a number that its class leaves open, and no skipping of whole samples at random, which is
# dropout of a kind that these cases leave out as they do the others.
OWN: Mapping[str, Mapping[str, object]] = {
    "nemotron": {"num_key_value_heads": 8},
    "beit": {"drop_path_rate": 0.0},
    "swin": {"drop_path_rate": 0.0},
}

# Models that do not work without an attention mask, so that their samples are padded.
PADDED = ("longt5", "switch_transformers")
