"""What the sides of a comparison share: one model, its first weights, one batch, one precision, one optimizer.

Sizes are chosen so that a step takes at least a tenth of a second and communication is a fair part of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from phalanx import tasks
from phalanx.model.capture import capture
from phalanx.model.captured import Captured
from phalanx.model.zoo import zoo

LR, BETAS, EPS, WEIGHT_DECAY, CLIP = 1e-3, (0.9, 0.95), 1e-8, 0.1, 1.0


@dataclass(frozen=True)
class Size:
    """layers x width; `samples` of `tokens` tokens are one global batch."""

    layers: int
    width: int
    vocabulary: int
    samples: int
    tokens: int


CPU_SIZE = Size(layers=6, width=256, vocabulary=2048, samples=8, tokens=128)
GPU_SIZE = Size(layers=8, width=768, vocabulary=8192, samples=64, tokens=1024)
SHAPES = ("llama", "gpt2")


@dataclass(frozen=True)
class Setting:
    """shape: llama or gpt2. dtype: what is computed in; masters: float32 weights are kept beside it."""

    shape: str
    size: Size
    dtype: str
    masters: bool

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    def spec(self) -> zoo.ModelSpec:
        return zoo.resolve(_CONFIGS[self.shape](self.size), task="causal-lm")

    def capture(self) -> Captured:
        spec = self.spec()
        inputs = tasks.get(spec.task).inputs(spec.config)
        return capture(spec, inputs, dtype=self.torch_dtype, dropout=0.0, check=False)

    def module(self) -> nn.Module:
        """The plain HuggingFace model in float32, with the same weights on every rank."""
        torch.manual_seed(0)
        return zoo.build(self.spec(), attention="sdpa", dropout=0.0)

    def batch(self) -> dict[str, Tensor]:
        spec = self.spec()
        return tasks.get(spec.task).synthetic(spec.config, batch=self.size.samples, tokens=self.size.tokens, seed=0)

    def share(self, rank: int, world: int, device: str) -> dict[str, Tensor]:
        """The samples of one of `world` equal replicas."""
        count = self.size.samples // world
        if count == 0:
            raise ValueError(f"{self.size.samples} sequence per step cannot be divided among {world} ranks")
        return {name: tensor[rank * count :][:count].to(device) for name, tensor in self.batch().items()}


def _llama(size: Size) -> Any:
    from transformers import LlamaConfig

    heads = size.width // 64 if size.width >= 512 else size.width // 32
    return LlamaConfig(
        hidden_size=size.width, intermediate_size=size.width * 11 // 4, num_hidden_layers=size.layers,
        num_attention_heads=heads, num_key_value_heads=heads // 2, vocab_size=size.vocabulary,
        max_position_embeddings=size.tokens, tie_word_embeddings=False,
    )  # fmt: skip


def _gpt2(size: Size) -> Any:
    """Untied: torch's pipelining has nothing for a weight that two stages share."""
    from transformers import GPT2Config

    heads = size.width // 64 if size.width >= 512 else size.width // 32
    return GPT2Config(
        n_embd=size.width, n_layer=size.layers, n_head=heads, vocab_size=size.vocabulary, n_positions=size.tokens,
        bos_token_id=0, eos_token_id=0, tie_word_embeddings=False,
    )  # fmt: skip


_CONFIGS = {"llama": _llama, "gpt2": _gpt2}


def adamw(parameters: list[nn.Parameter]) -> torch.optim.AdamW:
    """The optimizer of every side in torch, as Phalanx makes its own: matrices decay, vectors do not."""
    matrices = [p for p in parameters if p.dim() >= 2]
    vectors = [p for p in parameters if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=EPS, fused=True)
