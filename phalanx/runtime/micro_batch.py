"""What is alive on a rank because of one micro-batch: its inputs, and what each stage computed and still needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from phalanx.model.segment.segments import Saved, Segment


@dataclass
class StageRun:
    """One stage on one micro-batch, between the arrival of its inputs and its last weight gradient."""

    wires: dict[str, Tensor] = field(default_factory=dict)
    differentiable: dict[str, bool] = field(default_factory=dict)  # per wire
    gradients: dict[str, Tensor] = field(default_factory=dict)  # per wire
    saved: dict[int, tuple[Segment, Saved]] = field(default_factory=dict)  # per block, for B
    for_weights: dict[int, tuple[Segment, Saved]] = field(default_factory=dict)  # per block, for W


@dataclass
class MicroBatch:
    """One micro-batch: its inputs, the samples' dropout keys, and everything computed from them."""

    inputs: Mapping[str, Tensor]
    keys: Tensor  # [samples]
    dims: dict[str, int]
    values: dict[str, Tensor] = field(default_factory=dict)  # of the prologue
    dropout: dict[str, Tensor] = field(default_factory=dict)
    stages: dict[int, StageRun] = field(default_factory=dict)
    loss: Tensor | None = None  # summed over items; on the last stage only

    def stage(self, number: int) -> StageRun:
        return self.stages.setdefault(number, StageRun())
