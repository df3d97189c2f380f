"""What one rank of a tensor-parallel group really computes, and what its segments keep for the backward.

Counted on the rank's own graphs at one shape of micro-batch, on tensors without contents, so what several ranks do
alike is counted on each of them: matrix FLOPs and heads by walking each segment, what is kept by tracing it. Nothing is
computed and nothing allocated, whatever the size of the model. `model/measure.py` does the same for a model that is not
split, at several shapes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from phalanx.expressions import evaluate
from phalanx.model.captured import Captured
from phalanx.model.graph import graphs
from phalanx.model.graph.blocks import Block, Port
from phalanx.model.graph.graphs import flops
from phalanx.model.graph.normalise import retarget
from phalanx.model.ops.operators import as_on_gpu
from phalanx.model.segment import policies
from phalanx.model.segment.compile import Compiler
from phalanx.model.segment.joint import Joint, trace
from phalanx.model.segment.segments import Segment
from phalanx.model.shard.canonical import annotate
from phalanx.model.shard.sharded import Exchange, Part, Sharded


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


@dataclass(frozen=True)
class Work:
    """Of one block on one rank. attention: heads and key/value heads of each attention in it."""

    flops: int
    attention: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class RankWork:
    blocks: tuple[Work, ...]
    wires: Mapping[str, Tensor]  # without contents


_Counted = tuple[Work, tuple[Tensor, ...]]


def work_of(
    captured: Captured, sharded: Sharded, tp: int, dtype: torch.dtype, dims: Mapping[str, int]
) -> RankWork:  # fmt: skip
    """Runs every distinct segment once on tensors without contents."""
    tensors = LocalTensors(captured, sharded, tp, dtype, dims)
    counted: dict[tuple[object, ...], _Counted] = {}
    found = [Work(0, ()) for _ in sharded.parts]
    for number, part in tensors.parts():
        if part.segment is None:
            continue
        segment = tensors.segment(part)
        arguments = tensors.arguments(segment, part.degree)
        shapes = tuple((a.shape, a.dtype) if isinstance(a, Tensor) else a for a in arguments)
        key = (segment.template, shapes)
        if key not in counted:
            with tensors.mode, torch.no_grad():
                counted[key] = _count(tensors.graph(segment), arguments)
        work, outputs = counted[key]
        tensors.put(segment, iter(outputs))
        found[number] = Work(found[number].flops + work.flops, found[number].attention + work.attention)
    return RankWork(tuple(found), tensors.wires)


def _count(graph: fx.Graph, arguments: list[Tensor | int]) -> _Counted:
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    annotate(graph, dict(zip(placeholders, arguments, strict=True)), {})
    attending = [node for node in graph.nodes if node.target is torch.ops.phalanx.attention.default]
    heads = tuple((_heads(node, 0), _heads(node, 1)) for node in attending)
    outputs = tuple(node.meta["val"] for node in graph.output_node().args[0])  # pyright: ignore
    return Work(int(sum(flops(node) for node in graph.nodes)), heads), outputs


def _heads(node: fx.Node, argument: int) -> int:
    value = node.args[argument]
    assert isinstance(value, fx.Node)
    return value.meta["val"].shape[1]


_DEVICE = torch.device("cpu")
_SHARED = ("wire", "value", "input")
_HELD = ("parameter", "buffer", "constant")  # held for good, so they cost nothing extra
_SAME = ("spread", "scale")  # exchanges whose result is their source


@dataclass
class Kept:
    """Of one block. own: bytes that no other segment knows of; shared: tensors with a name."""

    own: int = 0
    shared: dict[str, int] = field(default_factory=dict[str, int])


def kept_by(
    captured: Captured, sharded: Sharded, tp: int, dtype: torch.dtype, dims: Mapping[str, int]
) -> tuple[Kept, ...]:  # fmt: skip
    """What each block keeps of one micro-batch when nothing is computed again, as on a GPU."""
    tensors = LocalTensors(captured, sharded, tp, dtype, dims)
    tracer = _Tracer(tensors, set(captured.trainable))
    found = tuple(Kept() for _ in sharded.parts)
    with as_on_gpu():
        for number, part in tensors.parts():
            if part.exchange is not None:
                tracer.moved(part.exchange.source, part.exchange.target, part.exchange.kind in _SAME)
            else:
                tracer.add(tensors.segment(part), part.degree, found[number])
    return found


class _Tracer:
    def __init__(self, tensors: LocalTensors, trainable: set[str]) -> None:
        self._tensors, self._trainable = tensors, trainable
        self._traced: dict[tuple[object, ...], tuple[Joint, Segment]] = {}
        self._differentiable: dict[str, bool] = {}  # per wire
        self._same: dict[str, str] = {}  # wires that are others

    def moved(self, source: str, target: str, is_same: bool) -> None:
        self._differentiable[target] = self._differentiable[source]
        if is_same:
            self._same[target] = self._same.get(source, source)

    def add(self, segment: Block, degree: int, kept: Kept) -> None:
        """Adds what a segment keeps, each storage once."""
        joint, traced = self._trace(segment, self._tensors.arguments(segment, degree))
        self._tensors.put(segment, iter([node.meta["val"] for node in joint.outputs]))
        self._differentiable |= dict(zip(segment.outputs, joint.differentiable, strict=True))
        sizes = {_storage(node): node.meta["val"].untyped_storage().nbytes() for node in traced.saved_nodes}
        for port, node in zip(_tensor_ports(segment), joint.inputs, strict=True):
            size = sizes.pop(_storage(node), None)
            if size is not None and port.kind in _SHARED:
                kept.shared[self._same.get(port.name, port.name)] = size
            elif size is not None and port.kind not in _HELD:
                kept.own += size
        for wire, node in zip(segment.outputs, joint.outputs, strict=True):
            if (size := sizes.pop(_storage(node), None)) is not None:
                kept.shared[wire] = size
        kept.own += sum(sizes.values())

    def _trace(self, segment: Block, arguments: list[Tensor | int]) -> tuple[Joint, Segment]:
        ports = _tensor_ports(segment)
        wants = tuple(self._wants_gradient(port.kind, port.name) for port in ports)
        shapes = tuple((a.shape, a.dtype) if isinstance(a, Tensor) else a for a in arguments)
        key = (segment.template, wants, shapes)
        if key not in self._traced:
            graph = self._tensors.graph(segment)
            retarget(graph, _DEVICE)
            is_parameter = [port.kind == "parameter" for port in ports]
            joint = trace(graph, arguments, wants, is_parameter, None)
            self._traced[key] = joint, Segment(joint, is_parameter, policies.used_by_backward(joint), Compiler("off"))
        return self._traced[key]

    def _wants_gradient(self, kind: str, name: str) -> bool:
        return name in self._trainable if kind == "parameter" else kind == "wire" and self._differentiable[name]


def _tensor_ports(segment: Block) -> list[Port]:
    return [port for port in segment.ports if port.kind != "size"]


def _storage(node: fx.Node) -> int:
    return node.meta["val"].untyped_storage()._cdata
