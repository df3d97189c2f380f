"""What the segments of one rank of a tensor-parallel group keep for the backward, found by tracing them without data.

Like `facts/measure.py` for a model that is not split, but at one shape, and with exchanges between segments.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, fx

from phalanx.model.captured import Captured
from phalanx.model.graph.blocks import Block, Port
from phalanx.model.graph.normalise import retarget
from phalanx.model.graph.sharded import Sharded
from phalanx.model.ops.operators import as_on_gpu
from phalanx.model.segment import policies
from phalanx.model.segment.compile import Compiler
from phalanx.model.segment.joint import Joint, trace
from phalanx.model.segment.segments import Segment
from phalanx.model.shard.local_tensors import LocalTensors

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
