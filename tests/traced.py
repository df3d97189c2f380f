"""One operator as a segment of its own, traced and cut the way training does it."""

from __future__ import annotations

from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx

from phalanx.model.segment import segments
from phalanx.model.segment.compile import Compiler


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
    segment = segments.build(graph, tensors, is_parameter, first, recompute=False, compiler=Compiler(mode))
    with torch.no_grad():
        [out], saved = segment.forward(tensors)
        d_inputs, _ = segment.backward_weight([], saved, [d_out])
    assert d_inputs[0] is not None
    return out, d_inputs[0]
