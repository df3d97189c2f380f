"""Segments run by hand, and one operator as a segment of its own, traced and cut the way training does it."""

from __future__ import annotations

from collections.abc import Sequence
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx

from phalanx.model.segment import segments
from phalanx.model.segment.compile import Compiler
from phalanx.model.segment.segments import Segment


class Run:
    """A segment's functions, one after the other, on these tensors and what earlier ones left."""

    def __init__(self, segment: Segment, tensors: Sequence[Tensor]) -> None:
        self.segment = segment
        self.known: dict[tuple[str, int], Tensor] = {("port", i): t for i, t in enumerate(tensors)}

    def forward(self) -> list[Tensor]:
        results = self._call(self.segment.forward)
        outputs = list(results[: len(self.segment.joint.outputs)])
        self._keep("output", outputs)
        self.left(results[len(outputs) :])
        return outputs

    def run(self) -> list[Tensor]:
        return list(self._call(self.segment.run))

    def again(self) -> list[Tensor]:
        return list(self._call(self.segment.again))

    def left(self, saved: Sequence[Tensor]) -> None:
        first = len(self.segment.saved_b)
        self._keep("saved_b", saved[:first])
        self._keep("saved_bw", saved[first:])

    def backward(self, d_outputs: list[Tensor]) -> list[Tensor | None]:
        self._keep("gradient", d_outputs)
        results = self._call(self.segment.backward)
        self._keep("saved_w", results[len(self.segment.gives) :])
        return self._given(results)

    def weight(self) -> list:
        return self._weights(self.segment.weight)[1]

    def backward_weight(self, d_outputs: list[Tensor]) -> tuple[list[Tensor | None], list]:
        self._keep("gradient", d_outputs)
        results, gradients = self._weights(self.segment.backward_weight)
        return self._given(results), gradients

    def saved(self, *kinds: str) -> list[Tensor]:
        return [tensor for (kind, _), tensor in self.known.items() if kind in kinds]

    def arguments(self, name: str) -> list[Tensor]:
        return [self.known[source] for source in getattr(self.segment, name).arguments]

    def _call(self, one: segments.Call) -> list:
        with torch.no_grad():
            return list(one.function(*[self.known[source] for source in one.arguments]))

    def _weights(self, one: segments.WeightCall) -> tuple[list, list]:
        arguments = [self.known[source] for source in one.arguments]
        with torch.no_grad():
            results = list(one.function(*arguments[: one.num_taken]))
        return results, one.gradients(arguments, results)

    def _keep(self, kind: str, tensors: Sequence[Tensor]) -> None:
        self.known |= {(kind, i): tensor for i, tensor in enumerate(tensors)}

    def _given(self, results: list) -> list[Tensor | None]:
        """Per input that is no parameter."""
        found = dict(zip(self.segment.gives, results, strict=False))
        return [found.get(i) for i, node in enumerate(self.segment.joint.inputs) if node not in self.segment.parameters]


def gradients(operator: Any, *arguments: Any, d_out: Tensor, mode: str = "aot_eager") -> tuple[Tensor, Tensor]:
    """The operator's (first) result and the gradient of its first argument. Numbers are constants of the graph."""
    graph = fx.Graph()
    tensors = [a for a in arguments if isinstance(a, Tensor)]
    nodes = [graph.placeholder(f"x{i}") if isinstance(a, Tensor) else a for i, a in enumerate(arguments)]
    out = graph.call_function(operator.default, tuple(nodes))
    several = len(operator.default._schema.returns) > 1
    graph.output((graph.call_function(getitem, (out, 0)) if several else out,))
    first = [tensor is tensors[0] for tensor in tensors]
    is_parameter = [False] * len(tensors)
    segment = segments.build(graph, tensors, is_parameter, first, compiler=Compiler(mode))
    run = Run(segment, tensors)
    [out] = run.forward()
    d_inputs, _ = run.backward_weight([d_out])
    assert d_inputs[0] is not None
    return out, d_inputs[0]
