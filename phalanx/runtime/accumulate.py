"""Gradients added up over micro-batches, in float32 (float64 when training in it).

A single gradient is kept as it came, since there is nothing to add. Every weight gradient of every plan passes
through `Accumulator.add`, so that the order and precision of the sum are decided in one place.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


class Accumulator:
    """The gradients of one step, by parameter name. A parameter used in several places gets one sum."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}

    def add(self, names: Sequence[str], gradients: Sequence[Tensor | None]) -> None:
        for name, gradient in zip(names, gradients, strict=True):
            if gradient is None:
                continue
            total = self._sums.get(name)
            if total is None:
                self._sums[name] = gradient
            elif gradient.dtype == _wide(total.dtype):
                self._sums[name] = gradient.add_(total)
            else:
                self._sums[name] = total.to(_wide(total.dtype)).add_(gradient)

    def take(self, names: Iterable[str]) -> dict[str, Tensor]:
        """The finished sums, which now belong to the caller; parameters that got no gradient are absent."""
        sums, self._sums = self._sums, {}
        return {name: sums[name] for name in names if name in sums}


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
