"""Runs segments: the forward, input gradients and weight gradients of one of them on one micro-batch.

Without tensor parallelism every block is one segment. It keeps the functions of each template for each set of shapes.
It orders nothing and sends nothing: what a segment needs from elsewhere is there when it is called, or it is a bug.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor, fx

from phalanx.expressions import evaluate
from phalanx.model.graph import graphs
from phalanx.model.graph.blocks import Block, Blocks, Port
from phalanx.model.graph.normalise import retarget, without_dropout
from phalanx.model.ops import random
from phalanx.model.segment import segments
from phalanx.model.segment.compile import Compiler
from phalanx.model.segment.joint import Outline, outline
from phalanx.model.segment.products import Gradient
from phalanx.model.segment.segments import Segment
from phalanx.runtime.micro_batch import Kept, MicroBatch, StageRun


class Compute:
    """blocks: every segment is one of them. `parameters` are plain tensors without autograd; those in `trainable` get
    gradients. degrees: the tensor degree of each segment; empty where every one sees all samples. products: gradients
    of parameters will be added up, so that those which are products are better not multiplied here."""

    def __init__(
        self,
        blocks: Blocks,
        parameters: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        *,
        trainable: Collection[str],
        device: torch.device,
        compiler: Compiler,
        recompute: bool = False,
        dropout: bool = True,
        degrees: Sequence[int] = (),
        products: bool = False,
    ) -> None:
        self.blocks, self.device, self._products = blocks, device, products
        self._degrees = degrees or [0] * len(blocks.blocks)
        self._parameters, self._trainable = parameters, set(trainable)
        self._compiler, self._recompute, self._buffers = compiler, recompute, buffers
        self._constants = {name: value.to(device) for name, value in blocks.constants.items()}
        self._prologue = fx.GraphModule({}, _graph(blocks.prologue, device, dropout)).forward
        self._templates = {key: _graph(t.text, device, dropout) for key, t in blocks.templates.items()}
        self._segments: dict[tuple[object, ...], Segment] = {}
        self._by_place: dict[tuple[object, ...], Segment] = {}
        self._outlines: dict[tuple[object, ...], tuple[Outline, ...]] = {}
        names = [name for block in blocks.blocks for name in block.names("dropout")] if dropout else []
        self._site_names = list(dict.fromkeys(names))
        self._sites = torch.tensor([random.site_hash(n) for n in self._site_names], dtype=torch.int64, device=device)

    def on(self, parameters: Mapping[str, Tensor]) -> Compute:
        """The same, with the same functions, on other values of the parameters."""
        other = copy.copy(self)
        other._parameters = parameters
        return other

    def micro_batch(self, inputs: Mapping[str, Tensor], keys: Tensor, dims: dict[str, int]) -> MicroBatch:
        """Computes everything that follows from the inputs alone."""
        batch = MicroBatch(inputs, keys, dims)
        arguments = [self._argument(port, batch, None) for port in self.blocks.prologue_ports]
        with torch.no_grad():
            batch.values.update(zip(self.blocks.values, self._prologue(*arguments), strict=True))
            if self._site_names:
                rows = random.site_keys(keys, self._sites)
                batch.dropout.update(zip(self._site_names, rows.unbind(0), strict=True))
        return batch

    def forward(self, number: int, batch: MicroBatch, run: StageRun, keep: bool, without: Collection[str] = ()) -> None:
        """One segment. keep: for a backward to come; else nothing is saved, because there is none (evaluation) or
        because this is done `again` before it. without: wires that are not kept because they are gathered again."""
        segment, tensors = self._called(number, batch, run)
        block = self.blocks.blocks[number]
        if keep:
            outputs, saved = segment.forward(tensors)
            run.saved[number] = _kept(segment, saved, {wire: run.wires[wire] for wire in without})
        else:
            outputs = segment.run(tensors)
        run.wires.update(zip(block.outputs, outputs, strict=True))
        run.differentiable.update(zip(block.outputs, segment.differentiable, strict=True))

    def leave_past(self, number: int, batch: MicroBatch) -> None:
        """After the forward of a segment for which no backward comes."""
        batch.view(self._degrees[number]).leave_past(self.blocks.blocks[number].names("past"))

    def again(self, number: int, batch: MicroBatch, run: StageRun, outputs: bool) -> None:
        """The forward of a segment done again for its backward; `outputs` only where something still reads them."""
        segment, tensors = self._called(number, batch, run)
        found, saved = segment.again(tensors, outputs)
        run.saved[number] = Kept(segment, saved)
        if found is not None:
            run.wires.update(zip(self.blocks.blocks[number].outputs, found, strict=True))

    def backward(self, number: int, run: StageRun) -> None:
        """Input gradients of one segment."""
        segment, saved = self._saved(number, run)
        block = self.blocks.blocks[number]
        if any(segment.differentiable):
            d_outputs = self._output_gradients(block, segment, run)
            d_inputs, for_weights = segment.backward(self._of(block), saved, d_outputs)
            run.for_weights[number] = (segment, for_weights)
            self._add_gradients(block, d_inputs, run)

    def weight(self, number: int, run: StageRun) -> list[Gradient]:
        """Gradients of the segment's parameters, as its B left them to do; none where nothing is trained."""
        block = self.blocks.blocks[number]
        if number not in run.for_weights:
            return [None] * len(block.names("parameter"))
        segment, for_weights = run.for_weights.pop(number)
        return segment.weight(self._of(block), for_weights)

    def backward_weight(self, number: int, run: StageRun) -> list[Gradient]:
        """Input gradients and weight gradients in one function."""
        segment, saved = self._saved(number, run)
        block = self.blocks.blocks[number]
        if not any(segment.differentiable):
            return [None] * len(block.names("parameter"))
        d_outputs = self._output_gradients(block, segment, run)
        d_inputs, d_parameters = segment.backward_weight(self._of(block), saved, d_outputs)
        del saved
        self._add_gradients(block, d_inputs, run)
        return d_parameters

    def outlines(
        self, number: int, batch: MicroBatch, run: StageRun, parameters: Mapping[str, Tensor]
    ) -> tuple[Outline, ...]:
        """What the outputs of a segment look like, without computing them; `parameters` need not have values."""
        block, view = self.blocks.blocks[number], batch.view(self._degrees[number])
        arguments = [
            parameters[port.name] if port.kind == "parameter" else self._argument(port, view, run)
            for port in block.ports
        ]
        wants = tuple(self._wants_gradient(port, run) for port in block.ports if port.kind != "size")
        key = (block.template, wants, _shapes(arguments))
        if key not in self._outlines:
            self._outlines[key] = outline(self._templates[block.template], arguments, wants)
        return self._outlines[key]

    def keeps_only_inputs(self) -> bool:
        """Whether every segment run so far keeps nothing for its backward but what it was given."""
        return all(segment.keeps_only_inputs for segment in self._segments.values())

    def _called(self, number: int, batch: MicroBatch, run: StageRun) -> tuple[Segment, list[Tensor]]:
        """The functions of a segment for a micro-batch, and the tensors they are called with."""
        block, view = self.blocks.blocks[number], batch.view(self._degrees[number])
        arguments = [self._argument(port, view, run) for port in block.ports]
        return self._segment(block, arguments, view, run), [a for a in arguments if isinstance(a, Tensor)]

    def _saved(self, number: int, run: StageRun) -> tuple[Segment, segments.Saved]:
        kept = run.saved.pop(number)
        saved = list(kept.saved)
        for place, wire in kept.missing:
            saved[place] = run.wires[wire]
        return kept.segment, tuple(saved)

    def _of(self, block: Block) -> list[Tensor]:
        return [self._parameters[name] for name in block.names("parameter")]

    def _output_gradients(self, block: Block, segment: Segment, run: StageRun) -> list[Tensor]:
        """What later blocks sent back for each differentiable output; zero where none of them needed it."""
        found: list[Tensor] = []
        for wire, needed, node in zip(block.outputs, segment.differentiable, segment.outputs, strict=True):
            gradient = run.gradients.pop(wire, None)
            if needed:
                like = node.meta["val"]
                found.append(
                    torch.zeros(like.shape, dtype=like.dtype, device=self.device) if gradient is None else gradient
                )
        return found

    def _add_gradients(self, block: Block, d_inputs: Sequence[Tensor | None], run: StageRun) -> None:
        tensor_ports = [p for p in block.ports if p.kind not in ("parameter", "size")]
        for port, gradient in zip(tensor_ports, d_inputs, strict=True):
            if port.kind == "wire" and gradient is not None:
                earlier = run.gradients.get(port.name)
                run.gradients[port.name] = gradient if earlier is None else earlier + gradient

    def _argument(self, port: Port, batch: MicroBatch, run: StageRun | None) -> Tensor | int:
        match port.kind:
            case "size":
                return evaluate(port.name, batch.dims)
            case "parameter":
                return self._parameters[port.name]
            case "wire":
                assert run is not None
                return run.wires[port.name]
            case "dropout":  # in evaluation the port is there, and nothing reads it
                return batch.dropout[port.name] if self._site_names else batch.keys
            case "value":
                return batch.values[port.name]
            case "input":
                return batch.inputs[port.name]
            case "past" | "start" | "whole_value" | "whole_input":
                return batch.of_slice(port.kind, port.name)
            case "buffer":
                return self._buffers[port.name]
            case _:
                return self._constants[port.name]

    def _segment(self, block: Block, arguments: Sequence[Tensor | int], batch: MicroBatch, run: StageRun) -> Segment:
        """The functions for these shapes, found by block and dims; blocks whose templates and shapes agree
        share them."""
        wires = tuple(run.differentiable[wire] for wire in block.names("wire"))
        place = (block.name, *batch.dims.values(), *wires)
        segment = self._by_place.get(place)
        if segment is None:
            segment = self._by_place[place] = self._shared_segment(block, arguments, run)
        return segment

    def _shared_segment(self, block: Block, arguments: Sequence[Tensor | int], run: StageRun) -> Segment:
        wants = tuple(self._wants_gradient(port, run) for port in block.ports if port.kind != "size")
        key = (block.template, wants, _shapes(arguments))
        if key not in self._segments:
            self._segments[key] = segments.build(
                self._templates[block.template], arguments,
                [port.kind == "parameter" for port in block.ports if port.kind != "size"], wants,
                recompute=self._recompute, compiler=self._compiler, products=self._products,
            )  # fmt: skip
        return self._segments[key]

    def _wants_gradient(self, port: Port, run: StageRun) -> bool:
        if port.kind == "parameter":
            return port.name in self._trainable
        return port.kind == "wire" and run.differentiable[port.name]


def _kept(segment: Segment, saved: segments.Saved, missing: Mapping[str, Tensor]) -> Kept:
    """What was saved, without the tensors that will come again."""
    if not missing:
        return Kept(segment, saved)
    left, places = list(saved), []
    for place, tensor in enumerate(saved):
        for wire, gone in missing.items():
            if tensor is gone:
                left[place] = tensor.new_empty(0)
                places.append((place, wire))
    return Kept(segment, tuple(left), tuple(places))


def _shapes(arguments: Sequence[Tensor | int]) -> tuple[object, ...]:
    return tuple((a.shape, a.dtype, a.stride()) if isinstance(a, Tensor) else a for a in arguments)


def _graph(text: str, device: torch.device, dropout: bool) -> fx.Graph:
    graph = graphs.load(text)
    retarget(graph, device)
    if not dropout:
        without_dropout(graph)
    return graph
