"""A module, a dataset, a collate function, an optimizer and a callback of your own.

    python examples/own_module.py

The module sums up sequences of different lengths. Its `forward` takes what `collate` returns, by name, and returns the
loss; Phalanx needs to know nothing else about it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import phalanx

LENGTH = 12


class Sequences(Dataset[tuple[Tensor, Tensor]]):
    """Sequences of 3 to 12 numbers, each with its sum."""

    def __len__(self) -> int:
        return 512

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(index)
        length = int(torch.randint(3, LENGTH + 1, (), generator=generator))
        values = torch.randn(length, generator=generator)
        return values, values.sum()


def collate(samples: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """Always as long as the longest sequence there is, so that a sample's row does not depend on its neighbours."""
    values = torch.zeros(len(samples), LENGTH)
    for row, (sequence, _) in zip(values, samples):
        row[: len(sequence)] = sequence
    return {"values": values, "total": torch.stack([total for _, total in samples])}


class Summer(nn.Module):
    def __init__(self, width: int = 64, depth: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(LENGTH, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.head = nn.Linear(width, 1)

    def forward(self, values: Tensor, total: Tensor) -> Tensor:
        hidden = self.first(values)
        for layer in self.layers:
            hidden = hidden + nn.functional.gelu(layer(hidden))
        return nn.functional.mse_loss(self.head(hidden)[:, 0], total)


class Best:
    """A callback: remembers the lowest loss. Its methods are those in `phalanx.training.reporting.HOOKS`."""

    def __init__(self) -> None:
        self.loss = float("inf")

    def on_step(self, record: dict[str, Any]) -> None:
        self.loss = min(self.loss, record["loss"])


def main() -> None:
    model, best = Summer(), Best()
    result = phalanx.train(
        model, Sequences(), collate=collate, callbacks=[best], optimizer_class=torch.optim.NAdam, weight_decay=0.0,
        batch_size=64, epochs=10, lr=3e-3, plan="mb=2", out="runs/summer",
    )  # fmt: skip
    print(f"loss {result.losses[0]:.3f} → {result.loss:.3f}, at best {best.loss:.3f}; weights in {result.export}")


if __name__ == "__main__":
    main()
