"""Two scripts as fine-tuners write them, of which only the Trainer changes: a causal language model on texts of several
lengths, with accumulation and a learning rate schedule, and a classification with metrics."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import BertConfig, BertForSequenceClassification, LlamaConfig, LlamaForCausalLM

VOCABULARY = 61


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=VOCABULARY, max_position_embeddings=32, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def bert() -> BertForSequenceClassification:
    torch.manual_seed(0)
    config = BertConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=VOCABULARY,
        max_position_embeddings=64, num_labels=3, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return BertForSequenceClassification(config)


def texts(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Of several lengths, with a column that no model takes."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(5, 13, (count,), generator=generator).tolist()
    return [
        {"input_ids": torch.randint(1, VOCABULARY, (n,), generator=generator).tolist(), "source": f"line {i}"}
        for i, n in enumerate(lengths)
    ]


def padded(samples: list[dict[str, Any]]) -> dict[str, Tensor]:
    """A collator: padding on the right, which is not learned."""
    longest = max(len(sample["input_ids"]) for sample in samples)
    ids = torch.tensor([s["input_ids"] + [0] * (longest - len(s["input_ids"])) for s in samples])
    mask = torch.tensor([[1] * len(s["input_ids"]) + [0] * (longest - len(s["input_ids"])) for s in samples])
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def sentences(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Of one length, each with its label, for transformers' own default collator."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, VOCABULARY, (count, 8), generator=generator)
    return [{"input_ids": row.tolist(), "label": int(row.sum()) % 3} for row in ids]


def accuracy(prediction: Any) -> dict[str, float]:
    return {"accuracy": float((np.argmax(prediction.predictions, -1) == prediction.label_ids).mean())}


COMMON: dict[str, Any] = {"report_to": "none", "use_cpu": True, "logging_steps": 1, "disable_tqdm": True, "seed": 7}


def causal_script(trainer_class: Any, arguments_class: Any, folder: str, **changes: Any) -> Any:
    """The trainer of the first script, before train()."""
    settings = {
        "num_train_epochs": 2, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2, "lr_scheduler_type": "cosine", "warmup_steps": 2, "weight_decay": 0.1,
        "max_grad_norm": 0.5, "eval_strategy": "epoch", "save_strategy": "no", **COMMON,
    }  # fmt: skip
    further = {name: changes.pop(name) for name in ("plan", "callbacks") if name in changes}
    return trainer_class(
        model=llama(), args=arguments_class(folder, **(settings | changes)), data_collator=padded,
        train_dataset=texts(22), eval_dataset=texts(6, seed=1), **further,
    )  # fmt: skip


def classification_script(trainer_class: Any, arguments_class: Any, folder: str, **changes: Any) -> Any:
    settings = {
        "max_steps": 6, "per_device_train_batch_size": 4, "per_device_eval_batch_size": 4, "learning_rate": 5e-3,
        "eval_strategy": "steps", "eval_steps": 3, "save_strategy": "no", **COMMON,
    }  # fmt: skip
    further = {name: changes.pop(name) for name in ("plan", "callbacks") if name in changes}
    return trainer_class(
        model=bert(), args=arguments_class(folder, **(settings | changes)), train_dataset=sentences(18),
        eval_dataset=sentences(10, seed=1), compute_metrics=accuracy, **further,
    )  # fmt: skip
