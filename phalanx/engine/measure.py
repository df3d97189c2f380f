"""Facts from a capture: every distinct segment is traced on fake tensors at a few shapes, and what it keeps is fitted.

Nothing is computed and nothing allocated, whatever the size of the model. `engine/describe.py` tells what a plan that
splits or slices the model makes of it; how long segments take is the profiler's business.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod

import torch

from phalanx.engine.probe import Prober
from phalanx.engine.trace import RESIDENT
from phalanx.errors import CaptureError
from phalanx.expressions import Fit
from phalanx.model.captured import Captured
from phalanx.model.facts.facts import (
    BlockFacts,
    ModelFacts,
    SharedFacts,
    TensorFacts,
    TiedFacts,
    UnitFacts,
)
from phalanx.model.graph import graphs
from phalanx.model.graph.blocks import Block, Blocks
from phalanx.model.interpret import tensor_ports
from phalanx.model.ops.operators import as_on_gpu
from phalanx.model.segment.compile import Compiler
from phalanx.model.segment.joint import storage
from phalanx.model.segment.segments import Segment
from phalanx.model.zoo.zoo import ModelSpec
from phalanx.predict.split_facts import Split

_SHARED = ("activation", "value", "input")  # ports whose tensors blocks may have in common
_POSITION_LIMITS = ("max_position_embeddings", "n_positions", "max_target_positions")


def measure(spec: ModelSpec, captured: Captured, dtype: torch.dtype) -> ModelFacts:
    """The facts of a model that was captured in `dtype`, as it is trained on a GPU."""
    prober = Prober(captured, Split(), dtype)
    with as_on_gpu():
        probes = [_described(captured.blocks, probe.traced.segments) for probe in prober.probes(Compiler("off"))]
    fitted, dims = _Fitted(captured, prober.fit, probes), tuple(prober.fit.dims)
    return ModelFacts(
        name=spec.name,
        task=spec.task,
        dtype=_dtype_name(dtype),
        dims=dims,
        max_tokens=_max_tokens(spec) if "tokens" in dims else None,
        num_parameters=sum(prod(shape) for shape in captured.shapes.values()),
        blocks=tuple(fitted.block(index) for index in range(len(captured.blocks.blocks))),
        tied=tuple(_tied(captured)),
        notes=captured.notes,
    )


@dataclass(frozen=True)
class _Probe:
    """One block at one shape, in bytes."""

    outputs: tuple[tuple[tuple[int, ...], str], ...]  # shape and dtype of each
    saved: int
    shared: tuple[tuple[str, int], ...]  # name of the tensor, bytes


def _described(blocks: Blocks, segments: Mapping[int, Segment]) -> list[_Probe]:
    """Each block, in order: where nothing is split or done again, it is one segment."""
    return [_describe(block, segments[number]) for number, block in enumerate(blocks.blocks)]


def _describe(block: Block, segment: Segment) -> _Probe:
    """What the segment keeps, by storage: views of one tensor are kept at the price of one, and this block's parts of
    the keys of dropout, which all blocks are given together, at their own."""
    joint = segment.joint
    kept = {storage(node): node.meta["val"].untyped_storage().nbytes() for node in segment.saved}
    ports = tensor_ports(block)
    for port, node in zip(ports, joint.inputs, strict=True):
        if port.kind in RESIDENT:
            kept.pop(storage(node), None)
    keys = [node for port, node in zip(ports, joint.inputs, strict=True) if port.kind == "dropout"]
    saved_keys = [node for node in keys if node in segment.saved]
    kept |= {storage(node): 0 for node in saved_keys}
    for node in saved_keys:
        kept[storage(node)] += node.meta["val"].nbytes
    places = {storage(node): port.name for port, node in zip(ports, joint.inputs, strict=True) if port.kind in _SHARED}
    places |= {storage(node): name for name, node in zip(block.outputs, joint.outputs, strict=True)}
    return _Probe(
        outputs=tuple((tuple(n.meta["val"].shape), _dtype_name(n.meta["val"].dtype)) for n in joint.outputs),
        saved=sum(kept.values()),
        shared=tuple((places[at], size) for at, size in kept.items() if at in places),
    )


class _Fitted:
    """Facts of blocks from their probes at all points."""

    def __init__(self, captured: Captured, fit: Fit, probes: Sequence[Sequence[_Probe]]) -> None:
        self.captured, self.fit = captured, fit
        self.blocks: Blocks = captured.blocks
        self.probes = list(zip(*probes, strict=True))  # per block, then per point
        self._polynomial = cache(fit.polynomial)
        # Named by the first block that has it: a fingerprint would change with every detail of capturing.
        self._first = {block.template: block.name for block in reversed(self.blocks.blocks)}
        self._activations = {
            name: self._tensor(name, index, place)
            for index, block in enumerate(self.blocks.blocks)
            for place, name in enumerate(block.outputs)
        }

    def block(self, index: int) -> BlockFacts:
        block, probes = self.blocks.blocks[index], self.probes[index]
        names = [name for name, _ in probes[0].shared]
        assert all([name for name, _ in probe.shared] == names for probe in probes), f"{block.name} changes with shape"
        sizes = zip(*[[size for _, size in probe.shared] for probe in probes], strict=True)
        return BlockFacts(
            name=block.name,
            template=self._first[block.template],
            units=tuple(self._units(block)),
            crossing=tuple(self._activations[name] for name in self.blocks.crossing(index + 1)),
            saved_bytes=self._expression(block, [probe.saved for probe in probes]),
            shared=tuple(SharedFacts(n, self._expression(block, s)) for n, s in zip(names, sizes, strict=True)),
        )

    def _tensor(self, name: str, index: int, place: int) -> TensorFacts:
        outputs = [probe.outputs[place] for probe in self.probes[index]]
        sizes = zip(*[shape for shape, _ in outputs], strict=True)
        texts = [self._expression(self.blocks.blocks[index], size) for size in sizes]
        return TensorFacts(name, tuple(int(text) if text.isdigit() else text for text in texts), outputs[0][1])

    def _expression(self, block: Block, values: Sequence[int]) -> str:
        expression = self._polynomial(tuple(values))
        if expression is None:
            raise CaptureError(
                f"what block '{block.name}' keeps or sends is no polynomial of {', '.join(self.fit.dims)}",
                "look for a stride, a pooling or a padding to a multiple along these dims: such a model can be trained "
                "but not planned",
            )
        return expression

    def _units(self, block: Block) -> Iterator[UnitFacts]:
        owned = parameters_of_units(self.captured, block)
        for name, expression in self.blocks.templates[block.template].flops.items():
            yield UnitFacts(name, owned[name], expression)


def parameters_of_units(captured: Captured, block: Block) -> dict[str, int]:
    """Elements of each unit. A parameter belongs to the unit of the first node that uses it."""
    template = captured.blocks.templates[block.template]
    owned = dict.fromkeys(template.flops, 0)
    graph = graphs.load(template.text)
    unit = dict(zip(graph.nodes, template.units, strict=True))
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    for port, node in zip(block.ports, placeholders, strict=True):
        if port.kind == "parameter":
            owned[unit[next(iter(node.users))]] += prod(captured.shapes[port.name])
    return owned


def _tied(captured: Captured) -> Iterator[TiedFacts]:
    users: dict[str, list[str]] = {}
    for block in captured.blocks.blocks:
        for name in dict.fromkeys(block.names("parameter")):
            users.setdefault(name, []).append(block.name)
    for name, blocks in users.items():
        if len(blocks) > 1:
            yield TiedFacts(name, prod(captured.shapes[name]), tuple(blocks))


def _max_tokens(spec: ModelSpec) -> int | None:
    config = spec.config.get_text_config() if spec.config is not None else None
    limits = [getattr(config, name, None) for name in _POSITION_LIMITS]
    return next((limit for limit in limits if isinstance(limit, int)), None)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
