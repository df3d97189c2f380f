"""The shapes of every value of a captured model, on tensors without contents, for dims that cannot be mistaken.

Dynamic dims get sizes that no model has, so that a dim of a value can be recognised by its size alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from phalanx.model.captured import Captured
from phalanx.model.graph import graphs
from phalanx.model.graph.blocks import Block
from phalanx.model.interpret import without_contents
from phalanx.model.shard.canonical import annotate, canonicalise

_SIZES = (59, 53, 47, 43)  # small enough for tables of positions
_WHOLE_TOKENS, _WHOLE_SIZE = "whole_tokens", 41  # in models that run on slices: the tokens of all slices together


@dataclass(frozen=True)
class Dims:
    """Which size stands for which dynamic dim."""

    sizes: Mapping[str, int]

    def name(self, size: int) -> str:
        """A size as an expression over the dynamic dims."""
        for name, own in self.sizes.items():
            if size % own == 0:
                rest = size // own
                return name if rest == 1 else f"{name}*{self.name(rest)}"
        return str(size)

    def elements(self, shape: torch.Size) -> str:
        return "*".join(self.name(size) for size in shape) or "1"

    def has_batch(self, shape: torch.Size) -> bool:
        """Whether its first dim counts samples, or what each sample has of something (flattened tokens)."""
        return bool(shape) and shape[0] % self.sizes["batch"] == 0

    def has_tokens(self, shape: torch.Size) -> bool:
        """Whether it is [samples, tokens, features]."""
        return len(shape) == 3 and shape[0] == self.sizes["batch"] and shape[1] > 1


class Outlines:
    """Runs the blocks of a model one after the other without computing anything."""

    def __init__(self, captured: Captured, dtype: torch.dtype) -> None:
        self._captured = captured
        names = dict.fromkeys(d for spec in captured.inputs for d in spec.dims if isinstance(d, str))
        sizes: dict[str, int] = dict(zip(names, _SIZES, strict=False))
        if any(port.kind == "past" for block in captured.blocks.blocks for port in block.ports):
            sizes[_WHOLE_TOKENS] = _WHOLE_SIZE
        self.dims = Dims(sizes)
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._values = without_contents(captured, captured.blocks, captured.shapes, dtype, sizes, self._mode)

    def blocks(self) -> Iterator[tuple[Block, fx.Graph]]:
        """Every block with its canonical graph, whose nodes have values and units. Blocks of one template share it
        where what they are given has the same shapes."""
        done: set[fx.Graph] = set()
        for block, graph in self.raw_blocks():
            if graph not in done:
                canonicalise(graph)
                done.add(graph)
            yield block, graph

    def raw_blocks(self) -> Iterator[tuple[Block, fx.Graph]]:
        """The same with the graphs as they were captured; they may be changed once they have been given out."""
        made: dict[tuple[object, ...], tuple[fx.Graph, list[Tensor]]] = {}
        for block in self._captured.blocks.blocks:
            arguments = self._values.arguments(block.ports)
            key = (block.template, *(a.shape if isinstance(a, Tensor) else a for a in arguments))
            if key not in made:
                graph = self._annotated(block, arguments)
                made[key] = graph, [node.meta["val"] for node in graph.output_node().args[0]]  # pyright: ignore
            graph, outputs = made[key]
            self._values.put(block, outputs)
            yield block, graph

    def value(self, name: str) -> Tensor:
        """A value of the prologue."""
        return self._values.tables["value"][name]

    def _annotated(self, block: Block, arguments: list[Tensor | int]) -> fx.Graph:
        template = self._captured.blocks.templates[block.template]
        graph = graphs.load(template.text)
        units = dict(zip(graph.nodes, template.units, strict=False))
        placeholders = [node for node in graph.nodes if node.op == "placeholder"]
        with self._mode, torch.no_grad():
            annotate(graph, dict(zip(placeholders, arguments, strict=True)), units)
        return graph
