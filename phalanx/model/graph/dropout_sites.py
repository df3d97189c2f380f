"""The places of a model that draw dropout: which of them attention has, and the keys that each one draws from."""

from __future__ import annotations

import torch
from torch import Tensor, fx

from phalanx.model.graph import graphs
from phalanx.model.graph.blocks import Blocks
from phalanx.model.ops import random


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
