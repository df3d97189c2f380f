"""What a rank holds at the moment of a step when it holds most, by what holds it.

From what is compiled and the shapes of micro-batches alone, before anything lies on the device: state by its layout,
values by the table of the program, and what computations need while they run. What libraries keep for themselves is
not counted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from phalanx.engine.compiled import Compiled
from phalanx.engine.gradients import wide
from phalanx.engine.inputs import Inputs
from phalanx.engine.reductions import Place
from phalanx.engine.trace import shape_for
from phalanx.model.segment.segments import Segment
from phalanx.params.matrix_wise import Holders, owners
from phalanx.params.optimizer_groups import is_layer_matrix
from phalanx.predict.costs import BucketCosts
from phalanx.predict.memory import Sizes, peak_in_order
from phalanx.program.bind import bind
from phalanx.program.instructions import COMPUTE, Instruction, Op
from phalanx.program.values import HOST, RESIDENT, Value

_STATE: tuple[str, ...] = ("parameters", "masters", "moments")


class RankMemory(NamedTuple):
    """Bytes by component, on the device and in the memory of the host."""

    device: dict[str, int]
    host: dict[str, int]


def rank_memory(compiled: Compiled, inputs: Mapping[Place, Inputs]) -> RankMemory:
    """Of a step on these micro-batches."""
    sizes, compute = _Sizes(compiled, inputs), compiled.training.compute
    table = bind(compiled.plan, sizes.shape, compiled.program, compiled.formation.pp_index)
    held, hosted = state_memory(compiled)
    held["buffers"] = _stored([*compute.buffers.values(), *compute.constants.values()])
    device = held | peak_in_order(table, sizes, sizes.single, sizes.working)
    host = hosted | peak_in_order(table, sizes, sizes, lambda it: 0, on_host=True)
    return RankMemory(_more_than_none(device), _more_than_none(host))


def state_memory(compiled: Compiled) -> RankMemory:
    """Held from step to step."""
    layout, rank, elsewhere = compiled.formation.state, compiled.rank, compiled.hosted()
    fetched = compiled.fetched()
    facts, whole, width = layout.facts, layout.sharding(rank).whole, compiled.dtype.itemsize
    device, host = ({name: 0 for name in _STATE} for _ in range(2))
    for number, bucket in layout.buckets(rank).items():
        for flat in filter(None, (bucket.trained, bucket.frozen)):
            home = host if number in fetched else device
            home["parameters"] += (flat.size if whole else flat.shard_size) * width
        if bucket.trained is not None and facts.masters:
            home = host if number in elsewhere else device
            home["masters"] += bucket.trained.shard_size * torch.float32.itemsize
        elif bucket.trained is not None and number in elsewhere and compiled.plan.steps_on_host and home is device:
            host["parameters"] += bucket.trained.shard_size * width  # those that the host updates
    for kept in layout.kept(rank):
        elements = kept.piece.stop - kept.piece.start
        if kept.facts.integer:
            device["parameters"] += elements * getattr(torch, kept.facts.integer).itemsize
        elif kept.facts.trained and kept.facts.bucket < facts.num_buckets:
            home = host if kept.facts.bucket in elsewhere else device
            for slot in facts.slots or ():
                home["moments"] += (1 if slot.is_counter else elements) * getattr(torch, slot.dtype).itemsize
    if compiled.uses_muon:
        device["moments"] += _muon_moments(compiled)
    return RankMemory(device, host)


def _muon_moments(compiled: Compiled) -> int:
    """One number for each element of a layer's matrix, on its owner where the plan splits it; two for all others."""
    layout, rank = compiled.formation.state, compiled.rank
    holders = Holders(layout, rank, compiled.device)
    owned, width = owners(holders, is_layer_matrix), holders.dtype.itemsize
    found = sum(math.prod(holders.shapes[name]) * width for name, owner in owned.items() if owner == rank)
    for kept in layout.updated(rank):
        if kept.facts.name not in owned:
            elements = kept.piece.stop - kept.piece.start
            is_matrix = is_layer_matrix(kept.facts.name, kept.facts.shape)
            found += elements * width if is_matrix else 2 * elements * width + torch.float32.itemsize
    return found


def _more_than_none(components: Mapping[str, int]) -> dict[str, int]:
    return {name: size for name, size in components.items() if size}


class _Sizes:
    """Bytes of values, and of what a computation needs beside them."""

    def __init__(self, compiled: Compiled, inputs: Mapping[Place, Inputs]) -> None:
        self._tracer, self._graph, self._inputs = compiled.training.tracer, compiled.graph, dict(inputs)
        self._footprints: dict[int, dict[Op, int]] = {}
        self._whole_shape = compiled.formation.shape
        self.shape = shape_for(self._tracer, self._whole_shape, compiled.program, self._inputs)
        self._of_buckets = Sizes(compiled.plan, {}, self.shape, bucket_costs(compiled), compiled.dtype.itemsize)

    def __call__(self, value: Value) -> int:
        if value.kind in RESIDENT:
            return 0
        if value.kind.removeprefix(HOST) in ("fetched", "gathered", "d_parameters", "reduced", "staged"):
            return self._of_buckets(value)
        inputs = self._inputs.get((value.micro_batch or 0, value.half or 0))
        if inputs is None or value.kind in ("loss", "items", "norm", "norms"):
            return 0
        if value.is_on_host:
            return self(value._replace(kind=value.kind.removeprefix(HOST)))
        if value.kind == "inputs":
            return inputs.num_bytes
        shape = self._tracer(inputs, value.slice or 0).shape(self._whole_shape)
        if value.kind in ("activation", "gradient"):
            return int(shape.sizes[value.what])
        block, number = map(int, value.what.split(":"))
        op = shape.ops_of(block)[number]
        if value.kind in ("past", "d_past"):
            width = self._of_buckets.element_bytes
            return int(op.past_bytes) * (max(1, 4 // width) if value.kind == "d_past" else 1)
        return int(getattr(op.bw, value.kind) or 0)

    def single(self, value: Value) -> int:
        """The same of what nothing was added to yet."""
        return self._of_buckets.single(value) if value.kind == "d_parameters" else self(value)

    def working(self, it: Instruction) -> int:
        if it.op not in COMPUTE:
            return 0
        traced = self._tracer(self._inputs[it.micro_batch or 0, it.half or 0], it.slice or 0)
        number = self._graph.part(it).segment
        assert number is not None
        segment = traced.segments[number]
        if id(segment) not in self._footprints:
            self._footprints[id(segment)] = _footprint(segment)
        return self._footprints[id(segment)][it.op] + (self._of_buckets.beside if it.op is Op.F else 0)


def bucket_costs(compiled: Compiled) -> list[BucketCosts]:
    """Bytes of every bucket as it would lie on this rank."""
    shapes, trained = compiled.composed.local_shapes(), compiled.formation.shape.elements
    elements = [sum(math.prod(shapes[name]) for name in names) for names in compiled.composed.buckets.names]
    facts, width = compiled.formation.facts, compiled.dtype.itemsize
    added = int(compiled.plan.sum_bytes(wide(compiled.dtype).itemsize))
    moments = sum(getattr(torch, slot.dtype).itemsize for slot in facts.slots or () if not slot.is_counter)
    masters = torch.float32.itemsize if facts.masters else 0
    return [
        BucketCosts(n * width, own * added, own * masters, own * moments, frozen_bytes=(n - own) * width)
        for n, own in zip(elements, trained, strict=True)
    ]


def _footprint(segment: Segment) -> dict[Op, int]:
    """At most, beside the values of the table."""
    found = segment.working
    needs = {Op.F: found.forward, Op.A: found.forward, Op.B: found.backward, Op.W: found.weight, Op.BW: found.together}
    return {op: max(sizes, default=0) for op, sizes in needs.items()}


def _stored(tensors: Iterable[Tensor]) -> int:
    """Bytes of memory, each once."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())
