"""Runs the model on tensors without contents, for one shape of micro-batch: what every activation looks like, and the
functions of every segment of this rank.

So both ends of a cut know what crosses it, and nobody has to announce anything. From the joint graphs of segments
follows what a backward needs (`program/shape.py`), from which programs are bound to their values.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from phalanx.engine.compose import ExecutionGraph
from phalanx.engine.compute import Compute
from phalanx.engine.inputs import Inputs
from phalanx.engine.reductions import Place
from phalanx.expressions import evaluate
from phalanx.model.graph.blocks import Block
from phalanx.model.interpret import tensor_ports
from phalanx.model.segment.joint import Outline, storage
from phalanx.model.segment.segments import Segment, total_bytes
from phalanx.model.shard.sharded import Part
from phalanx.model.slicing import TOKENS, WHOLE_TOKENS
from phalanx.program.instructions import COMPUTE, Program
from phalanx.program.shape import Backward, BlockOp, ModelShape

RESIDENT = ("parameter", "buffer", "constant")  # kinds of ports whose tensors are there for good


@dataclass
class Traced:
    """One shape of micro-batch. segments: those of this rank, by their number. ops: of every block."""

    outlines: dict[str, Outline] = field(default_factory=dict[str, Outline])
    segments: dict[int, Segment] = field(default_factory=dict[int, Segment])
    ops: list[tuple[BlockOp, ...]] = field(default_factory=list[tuple[BlockOp, ...]])

    def shape(self, shape: ModelShape) -> ModelShape:
        """The model's shape, with what is known of its backward."""
        return replace(shape, ops=tuple(self.ops))


def shape_for(
    tracer: Callable[[Inputs, int], Traced], shape: ModelShape, program: Program, inputs: Mapping[Place, Inputs]
) -> ModelShape:  # fmt: skip
    """The model's shape with a backward that does for all micro-batches and slices that a program computes on, and the
    sizes of the first."""
    places = dict.fromkeys((it.micro_batch or 0, it.half or 0, it.slice or 0) for it in program if it.op in COMPUTE)
    looks = [tracer(inputs[micro_batch, half], slice_) for micro_batch, half, slice_ in places]
    first = looks[0] if looks else tracer(next(iter(inputs.values())), 0)
    distinct = list({id(look): look for look in looks}.values())
    for other in distinct[1:]:
        pairs = zip(first.ops, other.ops, strict=True)
        first = replace(first, ops=[tuple(map(_for_both, *chains)) for chains in pairs])
    return first.shape(shape)


def _for_both(op: BlockOp, other: BlockOp) -> BlockOp:
    if op.traced is None or other.traced is None:
        return op
    return replace(op, traced=op.traced.or_else(other.traced))


class Tracer:
    """shapes: of every parameter of the model as far as it would lie here, also of those that live on other stages.
    own: the blocks of this rank; of the others only what they put out is looked at. dtypes: of parameters
    that are not in the precision of training."""

    def __init__(
        self,
        graph: ExecutionGraph,
        shape: ModelShape,
        compute: Compute,
        shapes: Mapping[str, tuple[int, ...]],
        dtype: torch.dtype,
        own: Collection[int],
        dtypes: Mapping[str, torch.dtype] | None = None,
    ) -> None:
        self._graph, self._shape, self._compute, self._own = graph, shape, compute, set(own)
        self._mode = FakeTensorMode()
        others = dtypes or {}
        with self._mode:
            self._parameters = {
                name: torch.empty(size, dtype=others.get(name, dtype), device=compute.device)
                for name, size in shapes.items()
            }
        self._known: dict[tuple[int, ...], Traced] = {}

    def __call__(self, inputs: Inputs, slice_: int = 0) -> Traced:
        key = tuple(inputs.dims(slice_, 0).values())
        if key not in self._known:
            self._known[key] = _Walk(self, inputs, slice_).run()
        return self._known[key]

    # For a walk.

    @property
    def graph(self) -> ExecutionGraph:
        return self._graph

    @property
    def compute(self) -> Compute:
        return self._compute

    def ops_of(self, block: int) -> tuple[BlockOp, ...]:
        return self._shape.ops_of(block)

    def is_own(self, block: int) -> bool:
        return block in self._own

    def parameter(self, name: str) -> Tensor:
        return self._parameters[name]

    def empty(self, look: Outline) -> Tensor:
        with self._mode:
            return look.empty(self._compute.device)


class _Walk:
    """Through all blocks, in order."""

    def __init__(self, tracer: Tracer, inputs: Inputs, slice_: int) -> None:
        self._tracer, self._inputs, self._slice, self._found = tracer, inputs, slice_, Traced()
        self._tensors: dict[str, Tensor] = {}  # activations, without contents
        self._differentiable: set[str] = set()

    def run(self) -> Traced:
        for block, parts in enumerate(self._tracer.graph.parts):
            ops = self._tracer.ops_of(block)
            self._found.ops.append(tuple(self._part(block, *pair) for pair in zip(parts, ops, strict=True)))
        return self._found

    def _part(self, block: int, part: Part, op: BlockOp) -> BlockOp:
        if part.redistribution is not None:
            redistribution, dims = part.redistribution, self._inputs.dims(self._slice, part.degree)
            source = self._tensors[redistribution.source]
            shape = redistribution.shape_after(source.shape, dims)
            look = Outline(shape, source.dtype, redistribution.source in self._differentiable)
            self._put([redistribution.target], [look])
            return replace(op, sizes=(str(_bytes(look)),))
        segment = self._tracer.graph.segment(part)
        arguments = [self._argument(segment, place, part.degree) for place in range(len(segment.ports))]
        wants = tuple(self._tracer.compute.wants_gradient(port, self._differentiable) for port in tensor_ports(segment))
        if not self._tracer.is_own(block):
            looks = self._tracer.compute.outlines(segment, arguments, wants)
            self._put(segment.outputs, looks)
            takes = tuple(w for w, look in zip(segment.outputs, looks, strict=True) if look.differentiable)
            return replace(op, traced=Backward(takes, (), (), (), ()), sizes=tuple(str(_bytes(o)) for o in looks))
        light = block in self._tracer.graph.light
        functions = self._tracer.compute.segment(segment, arguments, wants, light)
        assert part.segment is not None
        self._found.segments[part.segment] = functions
        looks = [_look(node, d) for node, d in zip(functions.joint.outputs, functions.joint.differentiable)]
        self._put(segment.outputs, looks)
        found = replace(op, **describe(segment, functions))  # pyright: ignore[reportArgumentType]
        return replace(found, past_bytes=self._past_bytes(segment, functions, part.degree)) if op.pasts else found

    def _past_bytes(self, segment: Block, functions: Segment, degree: int) -> str:
        """Keys and values of all slices of a micro-batch."""
        dims = self._inputs.dims(self._slice, degree)
        places = [i for i, port in enumerate(tensor_ports(segment)) if port.kind == "past"]
        handles = [functions.joint.inputs[place] for place in places]
        kept = [node for handle in handles for node in next(iter(handle.users)).args[1:3]]
        size = sum(node.meta["val"].nbytes for node in kept if isinstance(node, fx.Node))
        return str(size // dims[TOKENS] * dims[WHOLE_TOKENS])

    def _put(self, activations: Sequence[str], looks: Sequence[Outline]) -> None:
        for activation, look in zip(activations, looks, strict=True):
            self._found.outlines[activation] = look
            self._tensors[activation] = self._tracer.empty(look)
            if look.differentiable:
                self._differentiable.add(activation)

    def _argument(self, segment: Block, place: int, degree: int) -> Tensor | int:
        port, compute = segment.ports[place], self._tracer.compute
        match port.kind:
            case "size":
                return evaluate(port.name, self._inputs.dims(self._slice, degree))
            case "parameter":
                return self._tracer.parameter(port.name)
            case "activation":
                return self._tensors[port.name]
            case "buffer":
                return compute.buffers[port.name]
            case "constant":
                return compute.constants[port.name]
            case _:
                return self._inputs[self._slice, degree, port.kind, port.name]


def describe(block: Block, segment: Segment) -> dict[str, object]:
    """What its joint graph says of a segment, for the op that it is."""
    joint, ports = segment.joint, tensor_ports(block)
    activations = {i: port.name for i, port in enumerate(ports) if port.kind == "activation"}
    places = {storage(node): block.outputs[i] for i, node in reversed(list(enumerate(joint.outputs)))}
    places |= {storage(node): activations[i] for i, node in enumerate(joint.inputs) if i in activations}
    held = {storage(node) for i, node in enumerate(joint.inputs) if ports[i].kind in RESIDENT}
    given = {storage(node) for i, node in enumerate(joint.inputs) if i not in activations and storage(node) not in held}

    def of(nodes: Sequence[fx.Node]) -> tuple[tuple[str, ...], bool]:
        """The activations whose memory these hold, and whether they hold the micro-batch's inputs."""
        found = (places.get(storage(node)) for node in nodes)
        return tuple(dict.fromkeys(n for n in found if n)), any(storage(node) in given for node in nodes)

    def own(nodes: Sequence[fx.Node]) -> str:
        """Empty for nothing; something may still take no bytes."""
        return str(total_bytes(nodes, besides=(*joint.inputs, *joint.outputs, *joint.tangents))) if nodes else ""

    taken = [name for name, needed in zip(block.outputs, joint.differentiable, strict=True) if needed]
    tangents = dict(zip(map(storage, joint.tangents), taken, strict=True))
    reads, inputs = of(segment.saved)
    w_nodes = [node for node in segment.w_saved if node not in joint.tangents]
    w_reads, w_inputs = of(w_nodes)
    trains = segment.trains
    d_names = [activations[i] for i in segment.gives]
    return {
        "sizes": tuple(str(total_bytes([node])) for node in joint.outputs),
        "traced": Backward(
            tuple(taken), tuple(d_names), reads, w_reads if trains else (),
            tuple(tangents[storage(node)] for node in segment.w_saved if node in joint.tangents) if trains else (),
            inputs, w_inputs and trains, own(segment.saved_b), own(segment.saved_bw), own(segment.saved_w), trains,
            d_parameters=str(total_bytes([node for node in segment.d_parameters if node is not None])),
            same=_same_outputs(block, segment, activations), d_same=_same_gradients(segment, d_names, tangents),
        ),
    }  # fmt: skip


def _same_outputs(block: Block, segment: Segment, activations: Mapping[int, str]) -> tuple[tuple[str, str], ...]:
    known = {storage(node): activations[i] for i, node in enumerate(segment.joint.inputs) if i in activations}
    found: list[tuple[str, str]] = []
    for name, node in zip(block.outputs, segment.joint.outputs, strict=True):
        if storage(node) in known:
            found.append((name, known[storage(node)]))
        known.setdefault(storage(node), name)
    return tuple(found)


def _same_gradients(
    segment: Segment, names: Sequence[str], tangents: Mapping[int, str]
) -> tuple[tuple[str, str], ...]:  # fmt: skip
    known = dict(tangents)
    found: list[tuple[str, str]] = []
    for name, node in zip(names, segment.d_inputs, strict=True):
        assert node is not None
        if storage(node) in known:
            found.append((name, known[storage(node)]))
        known.setdefault(storage(node), name)
    return tuple(found)


def _look(node: fx.Node, differentiable: bool) -> Outline:
    value: Tensor = node.meta["val"]
    return Outline(tuple(value.shape), value.dtype, differentiable)


def _bytes(look: Outline) -> int:
    size = 1
    for n in look.shape:
        size *= n
    return size * look.dtype.itemsize
