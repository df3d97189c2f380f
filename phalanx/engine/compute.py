"""The functions of a rank's model: of every segment for every set of shapes, and of the prologue.

What was traced and compiled is kept, also beyond this object: functions belong to templates and shapes. It runs nothing
by itself and knows no program: `trace.py` asks it for segments, `link.py` makes calls of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from phalanx.expressions import evaluate
from phalanx.model.graph import graphs
from phalanx.model.graph.blocks import Block, Blocks, Port
from phalanx.model.graph.normalise import retarget, without_dropout
from phalanx.model.interpret import tensor_ports
from phalanx.model.ops import random
from phalanx.model.ops.operators import is_as_on_gpu
from phalanx.model.segment import segments
from phalanx.model.segment.compile import Compiler
from phalanx.model.segment.eager import as_function
from phalanx.model.segment.joint import Outline, outline
from phalanx.model.segment.segments import Segment

# What was built in this process, of all models and plans: another run of the same model traces and compiles nothing.
_known: dict[tuple[object, ...], Segment] = {}
_MOST_KNOWN = 1024
MOST_SHAPES = 8  # of micro-batches, for which values that follow from them are kept


class Compute:
    """blocks: every segment is one of them. Parameters in `trainable` get gradients. products: gradients of parameters
    will be added up, so that those which are products are better not multiplied by a segment."""

    def __init__(
        self,
        blocks: Blocks,
        buffers: Mapping[str, Tensor],
        *,
        trainable: Collection[str],
        device: torch.device,
        compiler: Compiler,
        dropout: bool = True,
        products: bool = False,
    ) -> None:
        self.blocks, self.device, self.buffers, self._dropout = blocks, device, buffers, dropout
        self._trainable, self._compiler, self._products = set(trainable), compiler, products
        self.constants = {name: value.to(device) for name, value in blocks.constants.items()}
        self.fixed = _fixed(blocks)
        self._changing = [name for name in blocks.values if name not in self.fixed]
        self._prologue, self._of_shapes = (self._part(names) for names in (self._changing, self.fixed))
        self._count = self._part([blocks.count])
        self._fixed_values: dict[tuple[object, ...], dict[str, Tensor]] = {}
        self._templates = {key: _graph(t.text, device, dropout) for key, t in blocks.templates.items()}
        self._segments: dict[tuple[object, ...], Segment] = {}
        self._outlines: dict[tuple[object, ...], tuple[Outline, ...]] = {}
        names = [name for block in blocks.blocks for name in block.names("dropout")] if dropout else []
        self._site_names = list(dict.fromkeys(names))
        self._sites = torch.tensor([random.site_hash(n) for n in self._site_names], dtype=torch.int64, device=device)

    def prologue(self, inputs: Mapping[str, Tensor], dims: Mapping[str, int]) -> dict[str, Tensor]:
        """Everything that follows from the inputs alone; what follows from their shapes is made once."""
        arguments, key = self._arguments(inputs, dims), (*dims.items(), *self.versions())
        with torch.no_grad():
            if key not in self._fixed_values:
                self._fixed_values[key] = dict(zip(self.fixed, self._of_shapes(*arguments), strict=True))
                if len(self._fixed_values) > MOST_SHAPES:
                    del self._fixed_values[next(iter(self._fixed_values))]
            changing = zip(self._changing, self._prologue(*arguments), strict=True)
            return {**self._fixed_values[key], **dict(changing)}

    def versions(self) -> tuple[object, ...]:
        """Another one when a buffer that the prologue reads has changed."""
        read = (self.buffers[port.name] for port in self.blocks.prologue_ports if port.kind == "buffer")
        return tuple(each for buffer in read for each in (id(buffer), buffer._version))

    def count(self, inputs: Mapping[str, Tensor], dims: Mapping[str, int]) -> Tensor:
        """The number of items that the loss of these inputs is a sum over, in float64."""
        with torch.no_grad():
            return self._count(*self._arguments(inputs, dims))[0].double()

    def dropout_keys(self, keys: Tensor) -> dict[str, Tensor]:
        """keys: of the samples."""
        if not self._site_names:
            return {}
        with torch.no_grad():
            rows = random.site_keys(keys, self._sites)
        return dict(zip(self._site_names, rows.unbind(0), strict=True))

    def segment(
        self, block: Block, arguments: Sequence[Tensor | int], wants: tuple[bool, ...], light: bool = False
    ) -> Segment:
        """The functions for these shapes, of tensors with or without contents. Blocks whose templates and shapes agree
        share them. wants: per tensor argument, whether its gradient is wanted. light: only products and attention are
        kept for the backward."""
        key = (block.template, wants, light, _shapes(arguments))
        if key not in self._segments:
            self._segments[key] = self._known_or_built(block, arguments, wants, light)
        return self._segments[key]

    def _known_or_built(
        self, block: Block, arguments: Sequence[Tensor | int], wants: tuple[bool, ...], light: bool
    ) -> Segment:  # fmt: skip
        is_parameter = tuple(port.kind == "parameter" for port in tensor_ports(block))
        text = self.blocks.templates[block.template].text
        form = (self.device, self._dropout, self._compiler, self._products, is_as_on_gpu(), light)
        key = (text, form, is_parameter, wants, _shapes(arguments))
        if key not in _known:
            if len(_known) == _MOST_KNOWN:
                del _known[next(iter(_known))]
            _known[key] = segments.build(
                self._templates[block.template], arguments, is_parameter, wants, compiler=self._compiler,
                products=self._products, light=light,
            )  # fmt: skip
        return _known[key]

    def outlines(
        self, block: Block, arguments: Sequence[Tensor | int], wants: tuple[bool, ...]
    ) -> tuple[Outline, ...]:  # fmt: skip
        """What the outputs of a segment look like, without its functions."""
        key = (block.template, wants, _shapes(arguments))
        if key not in self._outlines:
            self._outlines[key] = outline(self._templates[block.template], arguments, wants)
        return self._outlines[key]

    def wants_gradient(self, port: Port, differentiable: Collection[str]) -> bool:
        """differentiable: the activations to which a gradient flows."""
        return port.name in (self._trainable if port.kind == "parameter" else differentiable) and port.kind in (
            "parameter",
            "activation",
        )

    def _part(self, names: Sequence[str]) -> Callable[..., tuple[Tensor, ...]]:
        """The part of the prologue that makes these values."""
        graph = _graph(self.blocks.prologue, self.device, self._dropout)
        return as_function(_only(graph, [self.blocks.values.index(name) for name in names]))

    def _arguments(self, inputs: Mapping[str, Tensor], dims: Mapping[str, int]) -> list[Tensor | int]:
        held = {"input": inputs, "buffer": self.buffers, "constant": self.constants}
        return [
            evaluate(port.name, dims) if port.kind == "size" else held[port.kind][port.name]
            for port in self.blocks.prologue_ports
        ]


def _shapes(arguments: Sequence[Tensor | int]) -> tuple[object, ...]:
    return tuple((a.shape, a.dtype, a.stride()) if isinstance(a, Tensor) else a for a in arguments)


def _graph(text: str, device: torch.device, dropout: bool) -> fx.Graph:
    graph = graphs.load(text)
    retarget(graph, device)
    if not dropout:
        without_dropout(graph)
    return graph


def _only(graph: fx.Graph, places: Sequence[int]) -> fx.Graph:
    """The same graph with some of its outputs."""
    output = graph.output_node()
    output.args = (tuple(output.args[0][place] for place in places),)  # pyright: ignore
    graph.eliminate_dead_code()
    return graph


def _fixed(blocks: Blocks) -> list[str]:
    """The values of the prologue that follow from shapes, buffers and constants: rotary tables, positions."""
    graph, ports, changing = graphs.load(blocks.prologue), iter(blocks.prologue_ports), set[fx.Node]()
    for node in graph.nodes:
        from_input = node.op == "placeholder" and next(ports).kind == "input"
        if from_input or not changing.isdisjoint(node.all_input_nodes):
            changing.add(node)
    outputs: Any = graph.output_node().args[0]
    return [name for name, node in zip(blocks.values, outputs, strict=True) if node not in changing]
