"""The tensors of one rank of a tensor-parallel group at one shape of micro-batch, without contents.

Gives every segment its arguments and carries wires over exchanges, so that segments can be counted and traced one after
the other. Nothing is computed and nothing allocated, whatever the size of the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from phalanx.model.captured import Captured
from phalanx.model.graph import graphs
from phalanx.model.graph.blocks import Block, Port
from phalanx.model.graph.expressions import evaluate
from phalanx.model.graph.sharded import Exchange, Part, Sharded


class LocalTensors:
    """dims: of the whole micro-batch; a unit of smaller degree sees its part of the samples."""

    def __init__(
        self, captured: Captured, sharded: Sharded, tp: int, dtype: torch.dtype, dims: Mapping[str, int]
    ) -> None:
        self._captured, self._sharded, self._tp, self._dtype, self._dims = captured, sharded, tp, dtype, dims
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.wires: dict[str, Tensor] = {}
        self._held = {
            "parameter": {n: self._empty(p.local.local_shape, dtype) for n, p in sharded.parameters.items()},
            "buffer": {n: self._empty(t.shape, t.dtype) for n, t in captured.buffers.items()},
            "constant": {n: self._empty(t.shape, t.dtype) for n, t in captured.blocks.constants.items()},
        }
        self._views: dict[int, dict[str, dict[str, Tensor]]] = {}  # by degree: inputs, and values made of them

    def parts(self) -> Iterator[tuple[int, Part]]:
        """The parts of all blocks in order; wires of exchanges are moved, those of segments are left to the caller."""
        for number, parts in enumerate(self._sharded.parts):
            for part in parts:
                if part.exchange is not None:
                    self._move(part.exchange, self.dims(part.degree))
                yield number, part

    def segment(self, part: Part) -> Block:
        assert part.segment is not None
        return self._sharded.blocks.blocks[part.segment]

    def graph(self, segment: Block) -> fx.Graph:
        return graphs.load(self._sharded.blocks.templates[segment.template].text)

    def arguments(self, segment: Block, degree: int) -> list[Tensor | int]:
        """What a segment is called with, in the order of its ports."""
        return [self._argument(port, degree) for port in segment.ports]

    def put(self, segment: Block, outputs: Iterator[Tensor]) -> None:
        """Notes how the outputs of a segment look."""
        self.wires |= {wire: self._empty(t.shape, t.dtype) for wire, t in zip(segment.outputs, outputs, strict=True)}

    def dims(self, degree: int) -> dict[str, int]:
        return {**self._dims, "batch": self._dims["batch"] * degree // self._tp}

    def _argument(self, port: Port, degree: int) -> Tensor | int:
        if port.kind == "size":
            return evaluate(port.name, self.dims(degree))
        if port.kind == "wire":
            return self.wires[port.name]
        if port.kind == "dropout":
            return self._empty([self.dims(degree)["batch"]], torch.int64)
        return self._held[port.kind][port.name] if port.kind in self._held else self._view(degree)[port.kind][port.name]

    def _view(self, degree: int) -> dict[str, dict[str, Tensor]]:
        if degree not in self._views:
            dims, blocks = self.dims(degree), self._captured.blocks
            self._views[degree] = {"input": dict(self._inputs(dims)), "value": {}}
            prologue = fx.GraphModule({}, graphs.load(blocks.prologue))
            with self.mode, torch.no_grad():
                values = prologue(*[self._argument(port, degree) for port in blocks.prologue_ports])
            self._views[degree]["value"] = dict(zip(blocks.values, values, strict=True))
        return self._views[degree]

    def _inputs(self, dims: Mapping[str, int]) -> Iterator[tuple[str, Tensor]]:
        for spec in self._captured.inputs:
            shape = [dims[dim] if isinstance(dim, str) else dim for dim in spec.dims]
            yield spec.name, self._empty(shape, torch.int64 if spec.dtype == "int64" else self._dtype)

    def _move(self, exchange: Exchange, dims: Mapping[str, int]) -> None:
        source = self.wires[exchange.source]
        self.wires[exchange.target] = self._empty(exchange.shape_after(source.shape, dims), source.dtype)

    def _empty(self, shape: torch.Size | tuple[int, ...] | list[int], dtype: torch.dtype) -> Tensor:
        with self.mode:
            return torch.empty(tuple(shape), dtype=dtype)
