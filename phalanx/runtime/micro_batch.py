"""What is alive on a rank because of one micro-batch: its inputs, and what each stage computed and still needs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from phalanx.model.ops.slice_attention import Past, Slice
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
    whole: MicroBatch | None = None  # of which this is a slice
    begin: int = 0  # the first of the slice's tokens
    pasts: dict[str, Past] = field(default_factory=dict)  # per attention, of the whole
    slices: dict[str, Slice] = field(default_factory=dict)  # per attention, of this slice
    loss: Tensor | None = None  # summed over items; on the last stage only

    def view(self, degree: int) -> MicroBatch:
        """What a unit of this tensor degree sees of it."""
        return self.views.get(degree, self)

    def of_slice(self, kind: str, name: str) -> Tensor:
        """What only slices are asked for: where they begin, what lies before them, what is the whole's."""
        whole = self.whole
        assert whole is not None, f"{kind} of something that is not a slice"
        match kind:
            case "start":
                return torch.tensor(self.begin)
            case "past":
                if name not in self.slices:
                    past = whole.pasts.setdefault(name, Past(whole.dims["tokens"]))
                    self.slices[name] = Slice(past, self.begin)
                return self.slices[name].handle
            case "whole_value":
                return whole.values[name]
            case _:
                return whole.inputs[name]

    def leave_past(self, names: Iterable[str]) -> None:
        """Lets go, after the last slice, of the keys and values that were kept for later ones; no backward follows."""
        whole = self.whole
        if whole is not None and self.begin + self.dims["tokens"] == whole.dims["tokens"]:
            for name in names:
                whole.pasts[name].clear()

    def forget_past(self) -> None:
        """As if none of its slices had been computed."""
        for part in (self, *self.views.values()):
            part.slices.clear()
            if part.whole is not None:
                part.whole.pasts.clear()

    def stage(self, number: int) -> StageRun:
        return self.stages.setdefault(number, StageRun())


Place = tuple[int, int, int]  # micro-batch, slice, half


def place_of(instruction: Instruction) -> Place:
    """Which part of a step's samples and tokens an instruction is about."""
    assert instruction.micro_batch is not None
    return instruction.micro_batch, instruction.slice or 0, instruction.half or 0
