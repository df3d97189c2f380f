"""What is alive on a rank because of one micro-batch: its inputs, and what each stage computed and still needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from phalanx.model.segment.segments import Saved, Segment
from phalanx.program.instructions import Instruction


class Arriving(Protocol):
    """A tensor on its way."""

    def wait(self, what: str) -> Tensor: ...


@dataclass(frozen=True)
class Kept:
    """What a segment's forward left for its backward. missing: what will be gathered again, by place in `saved`."""

    segment: Segment
    saved: Saved
    missing: tuple[tuple[int, str], ...] = ()  # place, wire


@dataclass
class StageRun:
    """One stage on one micro-batch, between the arrival of its inputs and its last weight gradient."""

    wires: dict[str, Tensor] = field(default_factory=dict)
    differentiable: dict[str, bool] = field(default_factory=dict)  # per wire
    gradients: dict[str, Tensor] = field(default_factory=dict)  # per wire
    saved: dict[int, Kept] = field(default_factory=dict)  # per segment, for B
    for_weights: dict[int, tuple[Segment, Saved]] = field(default_factory=dict)  # per segment, for W
    arriving: dict[str, Arriving] = field(default_factory=dict)  # per wire that an exchange is bringing
    returning: dict[str, list[Arriving]] = field(default_factory=dict)  # gradients per wire, on their way back
    has_inputs: bool = False  # whether what the stage before handed on was taken
    has_gradients: bool = False  # whether the gradients of what was handed on were


@dataclass
class MicroBatch:
    """One micro-batch: its inputs, the samples' dropout keys, and everything computed from them."""

    inputs: Mapping[str, Tensor]
    keys: Tensor  # [samples]
    dims: dict[str, int]
    values: dict[str, Tensor] = field(default_factory=dict)  # of the prologue
    dropout: dict[str, Tensor] = field(default_factory=dict)
    stages: dict[int, StageRun] = field(default_factory=dict)
    views: dict[int, MicroBatch] = field(default_factory=dict)  # by tensor degree, where a rank has fewer samples
    loss: Tensor | None = None  # summed over items; on the last stage only

    def view(self, degree: int) -> MicroBatch:
        """What a unit of this tensor degree sees of it."""
        return self.views.get(degree, self)

    def stage(self, number: int) -> StageRun:
        return self.stages.setdefault(number, StageRun())


def number_of(instruction: Instruction) -> int:
    """Which of a step's micro-batches an instruction is about; halves are numbered through as if they were some."""
    assert instruction.micro_batch is not None
    return instruction.micro_batch if instruction.half is None else 2 * instruction.micro_batch + instruction.half
