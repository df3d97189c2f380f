"""The recorder's graphs are those of torch's tracer, node by node, and what it cannot record is left to that one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import fx
from torch.utils._pytree import tree_map_only

from phalanx.engine import compute
from phalanx.model.segment import joint
from phalanx.model.segment.joint import Joint, storage, trace
from phalanx.model.segment.record import NotPlain, Recorder
from tests import captured


class _Never(Recorder):
    """Leaves everything to torch's tracer."""

    def __init__(self, *arguments: Any) -> None:
        raise NotPlain("nothing")


def described(found: Joint) -> Iterator[tuple[object, ...]]:
    """Every node by its place, with what it gives and whose memory that is."""
    places = {node: place for place, node in enumerate(found.graph.nodes)}
    memory: dict[int, int] = {}
    for node in found.graph.nodes:
        arguments = tree_map_only(fx.Node, places.__getitem__, (node.args, dict(node.kwargs)))
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            look = (value.shape, value.stride(), value.dtype, value.device, value.storage_offset())
            yield node.op == "placeholder", node.target, arguments, look, memory.setdefault(storage(node), places[node])
        else:
            yield node.op, node.target, arguments
    for nodes in (found.inputs, found.tangents, found.outputs, found.gradients):
        yield tuple(None if node is None else places[node] for node in nodes)
    yield found.differentiable


def same_but_for_names(found: Joint) -> list[tuple[object, ...]]:
    return [row if row[0] is not True else (True, *row[2:]) for row in described(found)]


def joints(case: captured.Case) -> list[Joint]:
    """Of all blocks, traced anew."""
    session = case.session()
    [inputs] = case.micro_batches(session, [len(next(iter(case.batch.values())))])
    return [segment.joint for segment in session.compiled.training.tracer(inputs).segments.values()]


@pytest.mark.parametrize(
    ("name", "dropout"),
    [
        (captured.GPT2, 0.1), (captured.WHISPER, 0.0),
        pytest.param(captured.LLAMA, None, marks=pytest.mark.long),
        pytest.param(captured.MIXTRAL, None, marks=pytest.mark.long),
        pytest.param(captured.T5, 0.1, marks=pytest.mark.long),
        pytest.param(captured.GEMMA3, None, marks=pytest.mark.long),
    ],
)  # fmt: skip
def test_what_is_recorded_is_what_torch_traces(
    name: str, dropout: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = captured.named(name, dropout=dropout)
    with monkeypatch.context() as patch:
        patch.setattr(compute, "_known", {})
        patch.setattr(joint, "_traced", None)  # everything is recorded
        recorded = joints(case)
    monkeypatch.setattr(compute, "_known", {})
    monkeypatch.setattr(joint, "Recorder", _Never)
    for ours, theirs in zip(recorded, joints(case), strict=True):
        assert same_but_for_names(ours) == same_but_for_names(theirs)


def own_graph(*functions: Any) -> fx.Graph:
    graph = fx.Graph()
    node = graph.placeholder("x")
    for function in functions:
        node = graph.call_function(function, (node,))
    graph.output((node,))
    return graph


def add_in_place(x: torch.Tensor) -> torch.Tensor:
    return x.clone().add_(1)


def add_constant(x: torch.Tensor) -> torch.Tensor:
    return x + torch.tensor([1.0, 2.0, 3.0, 4.0])


@pytest.mark.parametrize("function", [add_in_place, add_constant])
def test_what_cannot_be_recorded_is_traced(function: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []
    original = joint._traced
    monkeypatch.setattr(joint, "_traced", lambda *given: calls.append(1) or original(*given))
    found = trace(own_graph(function), [torch.empty(3, 4)], [True], [False], None)
    assert calls and found.differentiable == (True,)
    assert not any(joint._mutates(node) for node in found.graph.nodes)
