"""What a segment's functions are said to need while they run is what they need."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from phalanx.model.segment.segments import running_bytes, total_bytes
from tests.model.test_segments import LAYERS, call, d_outputs_for
from tests.traced import Run


class Watched(TorchDispatchMode):
    """Sees, after every operator, how many bytes its results and those of earlier ones hold that are still there."""

    def __init__(self, given: list[Tensor]) -> None:
        super().__init__()
        self._given = {tensor.untyped_storage().data_ptr() for tensor in given}
        self._seen: list[weakref.ref[Tensor]] = []
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._seen += [weakref.ref(leaf) for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        alive = [tensor.untyped_storage() for found in self._seen if (tensor := found()) is not None]
        sizes = {storage.data_ptr(): storage.nbytes() for storage in alive if storage.data_ptr() not in self._given}
        self.peak = max(self.peak, sum(sizes.values()))
        return result


def watched(work: Callable[[], Any], given: list[Tensor]) -> int:
    with Watched(given) as mode, torch.no_grad():
        work()
    return mode.peak


@pytest.mark.parametrize(("name", "block"), LAYERS)
def test_functions_need_what_their_footprint_says(name: str, block: str) -> None:
    about = call(name, block)
    segment = about.build()
    found = segment.working
    run = Run(segment, about.tensors)
    run.forward()
    d_outputs = d_outputs_for(segment)
    outputs, left = segment.joint.outputs, [node for node in segment.d_inputs if node is not None]
    forward = watched(run.forward, about.tensors)
    values = total_bytes([*outputs, *segment.saved_b, *segment.saved_bw], besides=segment.joint.inputs)
    assert max(found.forward, default=0) == forward - values
    given = list(run.known.values())
    known = [*segment.joint.inputs, *outputs, *segment.saved, *segment.joint.tangents]
    fused = watched(lambda: run.backward_weight(d_outputs), [*given, *d_outputs])
    assert max(found.together, default=0) == fused - total_bytes(left, besides=known)
    backward = watched(lambda: run.backward(d_outputs), [*given, *d_outputs])
    assert max(found.backward, default=0) == backward - total_bytes([*left, *segment.saved_w], besides=known)
    assert max(found.weight, default=0) == watched(run.weight, list(run.known.values()))


def graph_of(function: Callable[..., Any], *shapes: tuple[int, ...]) -> tuple[fx.Graph, list[fx.Node]]:
    from torch.fx.experimental.proxy_tensor import make_fx

    graph = make_fx(function, tracing_mode="fake")(*[torch.empty(shape) for shape in shapes]).graph
    return graph, [node for node in graph.nodes if node.op == "placeholder"]


def test_values_are_let_go_of_when_nothing_needs_them_and_views_cost_nothing() -> None:
    def function(x: Tensor) -> Tensor:
        doubled = x * 2  # 40 bytes, until the sum
        return (doubled.view(5, 2) + 1).sum(0)  # 40, and 8

    graph, inputs = graph_of(function, (10,))
    (output,) = [node for node in graph.nodes if node.op == "output"]
    assert running_bytes(graph, output.all_input_nodes, inputs) == [40, 40, 80, 48]
    assert running_bytes(graph, output.all_input_nodes, inputs, fuses=True) == [0, 0, 0, 8]
    assert total_bytes(inputs) == 40 and total_bytes(inputs, besides=inputs) == 0
