"""Graphs as Python functions: the same results as fx gives, operator by operator."""

from __future__ import annotations

import weakref
from operator import getitem

import torch
from torch import Tensor, fx

from phalanx.model.ops import operators
from phalanx.model.segment.eager import as_function

aten = torch.ops.aten


def test_it_gives_what_the_graph_gives() -> None:
    graph = fx.Graph()
    x, w = graph.placeholder("x"), graph.placeholder("w")
    product = graph.call_function(aten.mm.default, (x, graph.call_function(aten.t.default, (w,))))
    parts = graph.call_function(aten.split.Tensor, (product, 2), {"dim": 1})
    last = graph.call_function(getitem, (parts, -1))
    joined = graph.call_function(aten.cat.default, ([last, product], 1))
    wide = graph.call_function(aten._to_copy.default, (joined,), {"dtype": torch.float64})
    graph.output((graph.call_function(aten.view.default, (wide, [-1])), None, product))
    arguments = torch.randn(3, 4), torch.randn(5, 4)
    expected, found = fx.GraphModule({}, graph)(*arguments), as_function(graph)(*arguments)
    assert found[1] is None and type(found) is tuple
    assert torch.equal(found[0], expected[0]) and torch.equal(found[2], expected[2])


def test_a_value_is_let_go_of_when_it_was_read_for_the_last_time() -> None:
    seen: list[weakref.ref[Tensor]] = []

    def note(value: Tensor) -> Tensor:
        seen.append(weakref.ref(value))
        return value + 1

    def look(value: Tensor) -> Tensor:
        assert seen[0]() is None, "what was read before still lives"
        return value

    graph = fx.Graph()
    made = graph.call_function(aten.mul.Tensor, (graph.placeholder("x"), 2.0))
    graph.output(graph.call_function(look, (graph.call_function(note, (made,)),)))
    assert torch.equal(as_function(graph)(torch.ones(2)), torch.full((2,), 3.0))


def test_operators_of_our_own_are_called_as_the_functions_they_are() -> None:
    graph = fx.Graph()
    taken = [graph.placeholder(name) for name in ("x", "weight", "offsets")]
    graph.output(graph.call_function(torch.ops.phalanx.grouped_matmul.default, tuple(taken)))
    arguments = torch.randn(4, 3), torch.randn(2, 3, 5), torch.tensor([1, 4])
    assert torch.equal(as_function(graph)(*arguments), operators.grouped_matmul(*arguments))
