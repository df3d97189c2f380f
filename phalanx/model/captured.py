"""What a capture gives: a model as blocks, and the facts about it that blocks alone do not hold."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from phalanx.model.graph.blocks import Blocks
from phalanx.tasks.base import Input


@dataclass(frozen=True)
class Captured:
    """A model, read as a graph and cut into blocks."""

    blocks: Blocks
    inputs: tuple[Input, ...]
    shapes: dict[str, tuple[int, ...]]  # of every parameter, by canonical name, in the model's order
    aliases: dict[str, str]  # tied name → canonical name
    trainable: tuple[str, ...]  # parameters that require gradients
    buffers: dict[str, Tensor]
    notes: tuple[str, ...]  # what could not be done the fast way, for the user
    integers: dict[str, str] = field(default_factory=dict)  # the dtypes of parameters that are tables of integers

    def dims(self, batch: dict[str, Tensor]) -> dict[str, int]:
        """The dynamic dims of a concrete batch."""
        return {
            dim: batch[spec.name].shape[axis]
            for spec in self.inputs
            for axis, dim in enumerate(spec.dims)
            if isinstance(dim, str)
        }
