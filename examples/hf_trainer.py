"""A fine-tuning script as one writes it for transformers' Trainer; one changed import lets it train under any plan.

phalanx launch --ranks 2 examples/hf_trainer.py        # with PHALANX_PLAN=pp=2,mb=2, or any other
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from phalanx.hf import Trainer, TrainingArguments  # instead of: from transformers import Trainer, TrainingArguments

torch.manual_seed(0)
config = LlamaConfig(
    hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4, vocab_size=128, pad_token_id=0
)
model = LlamaForCausalLM(config)
lines = torch.randint(1, 128, (64, 1)) + torch.arange(16) % 7  # every line counts up from somewhere
data: list[dict[str, Any]] = [{"input_ids": line, "labels": line} for line in lines % 128]

with tempfile.TemporaryDirectory() as folder:
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            folder, max_steps=12, per_device_train_batch_size=8, learning_rate=3e-3, logging_steps=4, weight_decay=0.1,
            eval_strategy="steps", eval_steps=12, save_strategy="no", report_to="none", disable_tqdm=True,
        ),
        train_dataset=data[:56],
        eval_dataset=data[56:],
    )  # fmt: skip
    trainer.train()
    if trainer.is_world_process_zero():
        print(f"evaluated: loss {trainer.state.log_history[-2]['eval_loss']:.3f}")
