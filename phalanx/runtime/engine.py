"""Runs a program: forwards, backwards and weight gradients of blocks, and nothing it was not told to.

The engine holds what is alive on this rank — parameters, values of each micro-batch, what forwards saved — and hands
gradients to an accumulator. It orders nothing, and knows no optimizer and no data.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, fx

from phalanx.model.graph import graphs
from phalanx.model.graph.blocks import Block, Blocks, Port
from phalanx.model.graph.expressions import evaluate
from phalanx.model.graph.normalise import retarget, without_dropout
from phalanx.model.ops import random
from phalanx.model.segment import segments
from phalanx.model.segment.compile import Compiler
from phalanx.model.segment.segments import Saved, Segment
from phalanx.program.instructions import Op, Program
from phalanx.runtime.accumulate import Accumulator


@dataclass
class MicroBatch:
    """One micro-batch: its inputs, the samples' dropout keys, and everything computed from it that is still needed."""

    inputs: Mapping[str, Tensor]
    keys: Tensor  # [samples]
    dims: dict[str, int]
    values: dict[str, Tensor] = field(default_factory=dict)
    dropout: dict[str, Tensor] = field(default_factory=dict)
    wires: dict[str, Tensor] = field(default_factory=dict)
    differentiable: dict[str, bool] = field(default_factory=dict)  # per wire
    gradients: dict[str, Tensor] = field(default_factory=dict)
    saved: dict[str, tuple[Segment, Saved]] = field(default_factory=dict)
    for_weights: dict[str, tuple[Segment, Saved]] = field(default_factory=dict)
    sources: dict[str, Mapping[str, Tensor]] = field(default_factory=dict)  # where each kind of port finds its value
    loss: Tensor | None = None  # summed over items


class Engine:
    """One rank's executor. `parameters` are plain tensors without autograd; those in `trainable` get gradients."""

    def __init__(
        self,
        blocks: Blocks,
        parameters: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        *,
        trainable: set[str],
        device: torch.device,
        compiler: Compiler,
        recompute: bool = False,
        dropout: bool = True,
    ) -> None:
        self.blocks, self.parameters, self.trainable = blocks, parameters, trainable
        self.device, self.compiler, self.recompute = device, compiler, recompute
        self.executed: Counter[str] = Counter()
        self._buffers = buffers
        self._constants = {name: value.to(device) for name, value in blocks.constants.items()}
        self._prologue = fx.GraphModule({}, _graph(blocks.prologue, device, dropout)).forward
        self._templates = {key: _graph(t.text, device, dropout) for key, t in blocks.templates.items()}
        self._segments: dict[tuple[object, ...], Segment] = {}
        self._by_place: dict[tuple[object, ...], Segment] = {}
        names = [name for block in blocks.blocks for name in block.names("dropout")] if dropout else []
        self._site_names = list(dict.fromkeys(names))
        self._sites = torch.tensor([random.site_hash(n) for n in self._site_names], dtype=torch.int64, device=device)

    def micro_batch(self, inputs: Mapping[str, Tensor], keys: Tensor, dims: dict[str, int]) -> MicroBatch:
        """Computes everything that follows from the inputs alone."""
        batch = MicroBatch(inputs, keys, dims)
        batch.sources = {
            "parameter": self.parameters, "buffer": self._buffers, "constant": self._constants, "input": inputs,
            "wire": batch.wires, "value": batch.values, "dropout": batch.dropout,
        }  # fmt: skip
        arguments = [self._argument(port, batch) for port in self.blocks.prologue_ports]
        with torch.no_grad():
            batch.values.update(zip(self.blocks.values, self._prologue(*arguments), strict=True))
            if self._site_names:
                rows = random.site_keys(keys, self._sites)
                batch.dropout.update(zip(self._site_names, rows.unbind(0), strict=True))
        return batch

    def run(self, program: Program, batches: Sequence[MicroBatch], scale: Tensor, accumulator: Accumulator) -> None:
        """Runs every instruction but STEP, which is the caller's.
        scale: the gradient of each summed loss (1 / items)."""
        actions: dict[Op, Callable[[MicroBatch], None]] = {
            Op.F: self.forward,
            Op.B: lambda batch: self._backward(batch, scale, None),
            Op.BW: lambda batch: self._backward(batch, scale, accumulator),
            Op.W: lambda batch: self._weight(batch, accumulator),
        }
        with torch.no_grad():
            for instruction in program:
                if instruction.op in actions:
                    actions[instruction.op](batches[instruction.micro_batch])
                    self.executed[str(instruction.op)] += 1

    @torch.no_grad()
    def forward(self, batch: MicroBatch, keep: bool = True) -> None:
        """All blocks in order. keep: for a backward to come; without it nothing is saved (evaluation)."""
        remaining = _uses(self.blocks)
        for block in self.blocks.blocks:
            arguments = [self._argument(port, batch) for port in block.ports]
            segment = self._segment(block, arguments, batch)
            outputs, saved = segment.forward([a for a in arguments if isinstance(a, Tensor)])
            for wire in block.names("wire"):
                remaining[wire] -= 1
                if not remaining[wire]:
                    batch.wires.pop(wire, None)
            batch.wires.update(zip(block.outputs, outputs, strict=True))
            if keep:
                batch.saved[block.name] = (segment, saved)
        batch.loss = batch.wires.pop(self.blocks.loss)

    def keeps_only_inputs(self) -> bool:
        """Whether every segment run so far keeps nothing for its backward but what it was given."""
        return all(segment.keeps_only_inputs for segment in self._segments.values())

    def _backward(self, batch: MicroBatch, scale: Tensor, accumulator: Accumulator | None) -> None:
        """All blocks in reverse: input gradients, and with an accumulator weight gradients in the same functions."""
        assert batch.loss is not None, "forward comes before backward"
        batch.gradients = {self.blocks.loss: scale.to(batch.loss.dtype)}
        for block in reversed(self.blocks.blocks):
            segment, saved = batch.saved.pop(block.name)
            if not any(segment.differentiable):
                batch.gradients.pop(self.blocks.loss, None)  # nothing at all is trained
                continue
            d_outputs = self._output_gradients(block, segment, batch)
            parameters = [self.parameters[name] for name in block.names("parameter")]
            if accumulator is None:
                d_inputs, for_weights = segment.backward(parameters, saved, d_outputs)
                batch.for_weights[block.name] = (segment, for_weights)
            else:
                d_inputs, d_parameters = segment.backward_weight(parameters, saved, d_outputs)
                accumulator.add(block.names("parameter"), d_parameters)
            del saved
            self._add_gradients(block, d_inputs, batch)

    def _weight(self, batch: MicroBatch, accumulator: Accumulator) -> None:
        for block in reversed(self.blocks.blocks):
            if block.name in batch.for_weights:
                segment, for_weights = batch.for_weights.pop(block.name)
                parameters = [self.parameters[name] for name in block.names("parameter")]
                accumulator.add(block.names("parameter"), segment.weight(parameters, for_weights))

    def _output_gradients(self, block: Block, segment: Segment, batch: MicroBatch) -> list[Tensor]:
        """What later blocks sent back for each differentiable output; zero where none of them needed it."""
        found: list[Tensor] = []
        for wire, needed, node in zip(block.outputs, segment.differentiable, segment.outputs, strict=True):
            gradient = batch.gradients.pop(wire, None)
            if needed:
                like = node.meta["val"]
                found.append(
                    torch.zeros(like.shape, dtype=like.dtype, device=self.device) if gradient is None else gradient
                )
        return found

    def _add_gradients(self, block: Block, d_inputs: Sequence[Tensor | None], batch: MicroBatch) -> None:
        tensor_ports = [p for p in block.ports if p.kind not in ("parameter", "size")]
        for port, gradient in zip(tensor_ports, d_inputs, strict=True):
            if port.kind == "wire" and gradient is not None:
                earlier = batch.gradients.get(port.name)
                batch.gradients[port.name] = gradient if earlier is None else earlier + gradient

    def _argument(self, port: Port, batch: MicroBatch) -> Tensor | int:
        if port.kind == "size":
            return evaluate(port.name, batch.dims)
        if port.kind == "dropout" and not self._site_names:
            return batch.keys  # evaluation: the port is there, nothing reads it
        return batch.sources[port.kind][port.name]

    def _segment(self, block: Block, arguments: Sequence[Tensor | int], batch: MicroBatch) -> Segment:
        """The functions for these shapes, found by block and dims; blocks whose templates and shapes agree
        share them."""
        place = (block.name, *batch.dims.values(), *(batch.differentiable[wire] for wire in block.names("wire")))
        segment = self._by_place.get(place)
        if segment is None:
            segment = self._by_place[place] = self._shared_segment(block, arguments, batch)
        for wire, differentiable in zip(block.outputs, segment.differentiable, strict=True):
            batch.differentiable[wire] = differentiable
        return segment

    def _shared_segment(self, block: Block, arguments: Sequence[Tensor | int], batch: MicroBatch) -> Segment:
        wants = tuple(self._wants_gradient(port, batch) for port in block.ports if port.kind != "size")
        shapes = tuple((a.shape, a.dtype, a.stride()) if isinstance(a, Tensor) else a for a in arguments)
        key = (block.template, wants, shapes)
        if key not in self._segments:
            self._segments[key] = segments.build(
                self._templates[block.template], arguments,
                [port.kind == "parameter" for port in block.ports if port.kind != "size"], wants,
                recompute=self.recompute, compiler=self.compiler,
            )  # fmt: skip
        return self._segments[key]

    def _wants_gradient(self, port: Port, batch: MicroBatch) -> bool:
        if port.kind == "parameter":
            return port.name in self.trainable
        return port.kind == "wire" and batch.differentiable[port.name]


def _graph(text: str, device: torch.device, dropout: bool) -> fx.Graph:
    graph = graphs.load(text)
    retarget(graph, device)
    if not dropout:
        without_dropout(graph)
    return graph


def _uses(blocks: Blocks) -> Counter[str]:
    return Counter(wire for block in blocks.blocks for wire in block.names("wire"))
