"""How large the values of a composed model are, for any shape of micro-batch: found by tracing it without data.

For predicting plans on a graph, as shipped facts do for whole models without one.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from phalanx.engine.compose import compose
from phalanx.engine.compute import Compute
from phalanx.engine.inputs import Inputs
from phalanx.engine.sample_shard import SampleShard
from phalanx.engine.trace import Tracer
from phalanx.expressions import evaluate
from phalanx.model.captured import Captured
from phalanx.model.facts.facts import DTYPE_BYTES
from phalanx.model.ops.operators import as_on_gpu
from phalanx.model.segment.compile import Compiler
from phalanx.model.slicing import TOKENS, WHOLE_TOKENS
from phalanx.plan.plan import Plan
from phalanx.program.costs import Costs
from phalanx.program.from_facts import Device, bucket_costs
from phalanx.program.shape import ModelShape

_CPU = torch.device("cpu")


class Described:
    """A model as the first tensor-parallel rank of a plan has it, which never has less than the others. All parameters
    count as trained."""

    def __init__(self, captured: Captured, plan: Plan, dtype: str) -> None:
        self._plan, self._dtype, self._precision = plan, dtype, getattr(torch, dtype)
        self._composed = compose(captured, plan, 0, self._precision, captured.trainable)
        graph, blocks = self._composed.graph, range(self._composed.shape.num_blocks)
        self._compute = Compute(
            graph.segments, captured.buffers, trainable=captured.trainable, device=_CPU, compiler=Compiler("off"),
            products=plan.adds_gradients,
        )  # fmt: skip
        self._tracer = Tracer(
            graph,
            self._composed.shape,
            self._compute,
            self._composed.local_shapes(),
            self._precision,
            blocks,
            self._composed.integers(),
        )
        self._known: dict[tuple[int, ...], ModelShape] = {}

    @property
    def shape(self) -> ModelShape:
        """Without sizes."""
        return self._composed.shape

    def at(self, dims: Mapping[str, int]) -> ModelShape:
        """With the sizes of a micro-batch, or a slice of one, of these dims."""
        key = tuple(dims.values())
        if key not in self._known:
            with as_on_gpu():
                self._known[key] = self._tracer(self._inputs(dims)).shape(self.shape)
        return self._known[key]

    def parameters(self) -> tuple[int, ...]:
        """Elements per block."""
        shapes, blocks = self._composed.local_shapes(), self._composed.captured.blocks.blocks
        return tuple(
            sum(_numel(shapes[name]) for name in dict.fromkeys(block.names("parameter"))) for block in blocks
        )  # fmt: skip

    def seconds(self, dims: Mapping[str, int], device: Device) -> tuple[float, ...]:
        """The forward of each block: its arithmetic or the writing of what it keeps, whichever takes longer."""
        shape = self.at(dims)
        found: list[float] = []
        for block, flops in enumerate(self._flops(dims)):
            chain = shape.ops_of(block)
            kept = {name for op in chain if op.kind == "segment" for name in op.bw.reads}
            own = sum(int(op.bw.saved_b or 0) + int(op.bw.saved_bw or 0) for op in chain if op.kind == "segment")
            saved = own + sum(int(shape.sizes[name]) for name in kept)
            found.append(max(flops / device.flops_per_s, saved / device.memory_bytes_per_s))
        return tuple(found)

    def costs(self, dims: Mapping[str, int], device: Device) -> Costs:
        """Of one micro-batch of `dims`, the largest; as `costs_of_facts`."""
        forward, shapes = self.seconds(dims, device), self._composed.local_shapes()
        elements = [sum(_numel(shapes[name]) for name in names) for names in self._composed.buckets.names]
        return Costs(
            forward=forward, backward=forward, weight=forward,
            buckets=tuple(bucket_costs(size, self._dtype, device) for size in elements),
            message_link=device.link, group_link=device.link, dims=dims, shape=self.at,
            element_bytes=DTYPE_BYTES[self._dtype],
        )  # fmt: skip

    def _flops(self, dims: Mapping[str, int]) -> list[float]:
        ops = [[s for s in self.shape.ops_of(b) if s.kind == "segment"] for b in range(self.shape.num_blocks)]
        if self._composed.sharded is None:
            return [float(flops) for flops in self._composed.captured.blocks.flops(dims)]
        return [float(sum(evaluate(op.flops, dims) for op in chain)) for chain in ops]

    def _inputs(self, dims: Mapping[str, int]) -> Inputs:
        captured, sliced = self._composed.captured, self._composed.sliced
        whole = {**dims, TOKENS: dims[WHOLE_TOKENS]} if WHOLE_TOKENS in dims else dims
        batch = {
            spec.name: torch.zeros(
                [whole[d] if isinstance(d, str) else d for d in spec.dims],
                dtype=torch.int64 if spec.dtype == "int64" else self._precision,
            )
            for spec in captured.inputs
        }
        tp, degrees = self._plan.tp, {part.degree for chain in self._composed.graph.parts for part in chain}
        portions = {degree: SampleShard(0, tp // degree) for degree in degrees if degree < tp}
        keys = torch.zeros(dims["batch"], dtype=torch.int64)
        edges = (0, dims[TOKENS]) if sliced is not None else ()
        return Inputs(self._compute, batch, keys, lambda own: captured.dims(dict(own)), portions, sliced, edges)


def _numel(shape: tuple[int, ...]) -> int:
    size = 1
    for n in shape:
        size *= n
    return size
