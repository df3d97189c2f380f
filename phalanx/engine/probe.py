"""A model as a rank would have it under a split of its tensors, traced without contents at a few shapes of micro-batch.

Facts are fitted to what is seen there: `describe.py`, `measure.py`. Nothing is computed but what follows from inputs,
and no parameter is allocated, whatever the size of the model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from phalanx.engine.compose import compose
from phalanx.engine.compute import Compute
from phalanx.engine.inputs import Inputs, SampleShard
from phalanx.engine.trace import Traced, Tracer
from phalanx.expressions import Fit
from phalanx.model.captured import Captured
from phalanx.model.segment.compile import Compiler
from phalanx.model.slicing import TOKENS, WHOLE_TOKENS
from phalanx.predict.split_facts import Split

_CPU = torch.device("cpu")
_GIVEN = ("input", "value", "whole_input", "whole_value")  # kinds of what follows from a micro-batch's samples


@dataclass(frozen=True)
class Probe:
    """All blocks at one shape of micro-batch. inputs: bytes of what follows from its samples."""

    traced: Traced
    inputs: int


class Prober:
    """fit: has the shapes that are probed, and the expressions over their dims."""

    def __init__(self, captured: Captured, split: Split, dtype: torch.dtype) -> None:
        self._split, self._dtype = split, dtype
        self.composed = compose(captured, split.plan, 0, dtype, captured.trainable)
        self.graph = self.composed.graph
        degrees = {part.degree for chain in self.graph.parts for part in chain} if split.tp > 1 else {1}
        self._shards = {d: SampleShard(0, split.tp // d) for d in degrees if d < split.tp}
        dims = [dim for spec in captured.inputs for dim in spec.dims if isinstance(dim, str)]
        self.fit = Fit(
            list(dict.fromkeys([*dims, *([WHOLE_TOKENS] if split.sliced else [])])),
            [(dim, d) for d in sorted(degrees) if d > 1 for dim in (TOKENS, "source")] if split.sequence else [],
            multiple=math.lcm(*(shard.count for shard in self._shards.values())),
        )

    def probes(self, compiler: Compiler) -> list[Probe]:
        """At every point of the fit."""
        composed, shape = self.composed, self.composed.shape
        compute = Compute(
            self.graph.segments, composed.captured.buffers, trainable=composed.captured.trainable, device=_CPU,
            compiler=compiler, products=True,
        )  # fmt: skip
        tracer = Tracer(
            self.graph, shape, compute, composed.local_shapes(), self._dtype, range(shape.num_blocks),
            composed.integers(),
        )  # fmt: skip
        return [self._probe(compute, tracer, dims) for dims in self.fit.points]

    def _probe(self, compute: Compute, tracer: Tracer, dims: dict[str, int]) -> Probe:
        inputs = self._inputs(compute, dims)
        traced = tracer(inputs)
        resident = {t.untyped_storage().data_ptr() for t in (*compute.buffers.values(), *compute.constants.values())}
        held = [tensor.untyped_storage() for key, tensor in inputs.items() if key[2] in _GIVEN]
        sizes = {storage.data_ptr(): storage.nbytes() for storage in held}
        return Probe(traced, sum(size for at, size in sizes.items() if at not in resident))

    def _inputs(self, compute: Compute, dims: dict[str, int]) -> Inputs:
        captured, sliced = self.composed.captured, self.composed.sliced
        whole = {**dims, TOKENS: dims[WHOLE_TOKENS]} if self._split.sliced else dims
        batch = {
            spec.name: torch.zeros(
                [whole[d] if isinstance(d, str) else d for d in spec.dims],
                dtype=torch.int64 if spec.dtype == "int64" else self._dtype,
            )
            for spec in captured.inputs
        }
        keys = torch.zeros(dims["batch"], dtype=torch.int64)
        edges = (0, dims[TOKENS]) if sliced is not None else ()
        return Inputs(compute, batch, keys, lambda own: captured.dims(dict(own)), self._shards, sliced, edges)
