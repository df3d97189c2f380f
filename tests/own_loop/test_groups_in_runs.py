"""Parameter groups act in runs too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.params.groups import ParameterGroup
from phalanx.training.trainer import train
from tests.params.test_groups import no_decay


class Line(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.second(self.first(x).tanh())[:, 0], y)


def test_a_run_has_groups_too(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Line()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    data: list[Any] = [{"x": torch.randn(3), "y": torch.randn(())} for _ in range(8)]
    train(
        model, data, steps=2, batch_size=4, optimizer="sgd", lr=0.1, lr_schedule="constant", weight_decay=0.0,
        clip=None, groups=[ParameterGroup(no_decay, freeze=True), ParameterGroup.read("second.*:lr=0")],
        out=tmp_path / "run", progress="off", export=False, device="cpu",
    )  # fmt: skip
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {"first.weight"}
