"""A plain PyTorch training script, turned parallel by five changed lines.

    python examples/own_loop.py
    torchrun --nproc-per-node 2 examples/own_loop.py pp=2,mb=4
    torchrun --nproc-per-node 2 examples/own_loop.py tp=2
    torchrun --nproc-per-node 2 examples/own_loop.py dp=2,zero=2
    torchrun --nproc-per-node 2 examples/own_loop.py pp=2,mb=2,slices=4
    torchrun --nproc-per-node 2 examples/own_loop.py pp=2,mb=4,offload=activations

Behind each changed line stands what it was before. The losses are those of the plain script, to the last digits.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW

import phalanx  # was: nothing

VOCABULARY, WIDTH, HEADS, DEPTH, TOKENS, SAMPLES, STEPS = 64, 32, 4, 4, 16, 8, 6


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        samples, tokens, _ = x.shape
        heads = self.qkv(self.norm1(x)).view(samples, tokens, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(samples, tokens, -1))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(DEPTH))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids) + self.places(torch.arange(ids.shape[1]))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def next_token(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Sequences that count up by one to five: what comes next can be learned."""
    generator = torch.Generator().manual_seed(step)
    start, by = (torch.randint(1, 6, (SAMPLES, 1), generator=generator) for _ in range(2))
    tokens = (start + by * torch.arange(TOKENS + 1)) % VOCABULARY
    return tokens[:, :-1], tokens[:, 1:]


def main(plan: str) -> None:
    torch.manual_seed(0)
    model = LanguageModel().double()
    dims = {"ids": ("batch", "tokens"), "target": ("batch", "tokens")}  # only slices need to know
    options = {"example": batch(0), "loss": next_token, "plan": plan, "dims": dims, "dtype": "float64"}
    session = phalanx.open(model, **options)  # was: nothing
    optimizer = AdamW(session.parameters(), lr=1e-2)  # was: optimizer = AdamW(model.parameters(), lr=1e-2)
    say = print if session.is_main else lambda text: None  # was: say = print
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=STEPS)
    for step in range(STEPS):
        optimizer.zero_grad()
        ids, target = batch(step)
        loss = session.forward_backward((ids, target))  # was: loss = next_token(model(ids), target); loss.backward()
        optimizer.step()
        scheduler.step()
        say(f"step {step}  loss {loss.item():.12f}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "")
