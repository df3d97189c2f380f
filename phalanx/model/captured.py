"""What a capture gives: a model as blocks, the facts that blocks alone do not hold, and where it draws dropout."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, fx

from phalanx.model.graph import graphs
from phalanx.model.graph.blocks import Blocks
from phalanx.model.ops import random
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

    def buffers_on(self, device: torch.device) -> dict[str, Tensor]:
        return {name: buffer.to(device) for name, buffer in self.buffers.items()}


def attention_sites(blocks: Blocks) -> tuple[str, ...]:
    """Module paths whose attention probabilities are dropped out."""
    found: list[str] = []
    for block in blocks.blocks:
        graph = graphs.load(blocks.templates[block.template].text)
        placeholders = [node for node in graph.nodes if node.op == "placeholder"]
        for node in graph.nodes:
            if node.target is torch.ops.phalanx.attention.default and isinstance(node.args[6], fx.Node):
                found.append(block.ports[placeholders.index(node.args[6])].name.rpartition("#")[0])
    return tuple(dict.fromkeys(found))


def dropout_keys(blocks: Blocks, samples: Tensor) -> dict[str, Tensor]:
    """Site → the keys of these samples there. samples: [samples]."""
    names = dict.fromkeys(name for block in blocks.blocks for name in block.names("dropout"))
    return {name: random.site_keys(samples, torch.tensor([random.site_hash(name)]))[0] for name in names}
