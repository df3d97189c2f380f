"""The scale of the loss in float16: as large as gradients allow, found by trying.

A step whose gradients overflow on any rank is skipped on all of them (`engine/reductions.py` sees to that) and halves
the scale; it doubles after many good steps. It lives on the device, so that nobody waits for it.
"""

from __future__ import annotations

import torch
from torch import Tensor

INITIAL = 2.0**16
GROWTH_INTERVAL = 2000  # good steps before the scale is doubled


class LossScale:
    def __init__(self, device: torch.device, initial: float = INITIAL, interval: int = GROWTH_INTERVAL) -> None:
        self.value = torch.tensor(initial, dtype=torch.float64, device=device)
        self._good = torch.zeros((), dtype=torch.int64, device=device)  # steps since the last change
        self._interval = interval

    def update(self, finite: Tensor) -> None:
        good = torch.where(finite, self._good + 1, 0)
        grows = good >= self._interval
        factor = torch.where(finite, torch.where(grows, 2.0, 1.0), 0.5)
        self.value = (self.value * factor).clamp(min=1.0)
        self._good = torch.where(grows, 0, good)

    def state(self) -> dict[str, float]:
        return {"value": float(self.value), "good": float(self._good)}

    def load(self, state: dict[str, float]) -> None:
        self.value.fill_(state["value"])
        self._good.fill_(int(state["good"]))
