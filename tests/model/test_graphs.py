"""Graphs as text: canonical, readable back, and equal exactly when they compute the same."""

from __future__ import annotations

import json
import operator

import pytest
import torch
from torch import fx

from phalanx.model import capture
from phalanx.model.graph import graphs
from tests import captured

aten = torch.ops.aten


def build(factor: float = 2.0, name: str = "x", **options) -> fx.Graph:
    graph = fx.Graph()
    x = graph.placeholder(name)
    y = graph.call_function(aten.mul.Tensor, (x, factor))
    pair = graph.call_function(aten.topk.default, (y, 2), options)
    graph.output((graph.call_function(operator.getitem, (pair, 0)), None))
    return graph


@pytest.mark.parametrize("model", [captured.GPT2, captured.T5, captured.MIXTRAL, captured.WHISPER])
def test_every_template_of_a_captured_model_reads_back_as_the_same_text(model: str) -> None:
    blocks = captured.named(model).blocks
    for text in (blocks.prologue, *(template.text for template in blocks.templates.values())):
        assert graphs.dump(graphs.load(text)) == text


def test_blocks_survive_json() -> None:
    case = captured.named(captured.T5)
    stored = json.loads(json.dumps(capture.blocks_to_json(case.blocks)))
    restored = capture.blocks_from_json(stored)
    assert restored.blocks == case.blocks.blocks
    assert (restored.templates, restored.prologue) == (case.blocks.templates, case.blocks.prologue)
    assert json.loads(json.dumps(capture.blocks_to_json(restored))) == stored


def test_constants_survive_json_bit_by_bit() -> None:
    for value in (torch.tensor([0.1, float("inf")]), torch.tensor(7), torch.tensor([[True], [False]])):
        back = capture._constant_from_json(json.loads(json.dumps(capture._constant_to_json(value))))
        assert back.dtype == value.dtype and torch.equal(back, value)


def test_a_graph_read_back_gives_the_same_results() -> None:
    graph = build(0.1, largest=False)
    x = torch.randn(5, dtype=torch.float64)
    (expected, nothing), (got, also_nothing) = (
        fx.GraphModule({}, g)(x) for g in (graph, graphs.load(graphs.dump(graph)))
    )
    assert torch.equal(got, expected)
    assert nothing is also_nothing is None


def test_arguments_of_every_kind_are_kept() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    options = {"dtype": torch.bfloat16, "memory_format": torch.preserve_format, "device": torch.device("cpu")}
    values = (x, slice(None, 3, x), [1, True, None, -float("inf"), 1e-300], {"key": (x, "text")})
    graph.output(graph.call_function(operator.getitem, values, options))
    node = list(graphs.load(graphs.dump(graph)).nodes)[1]
    new = node.args[0]
    assert node.args == (new, slice(None, 3, new), [1, True, None, -float("inf"), 1e-300], {"key": [new, "text"]})
    assert node.kwargs == options


def test_fingerprints_are_equal_exactly_when_texts_are() -> None:
    same = [graphs.dump(build()), graphs.dump(build())]
    others = [graphs.dump(g) for g in (build(2.5), build(name="y"), build(largest=False), build(2))]
    assert same[0] == same[1]
    prints = [graphs.fingerprint(text) for text in (same[0], *others)]
    assert len(set(prints)) == len({same[0], *others}) == 5


def test_names_of_inner_nodes_do_not_matter() -> None:
    renamed = build()
    for node in renamed.nodes:
        if node.op == "call_function":
            node.name = f"other_{node.name}"
    assert graphs.dump(renamed) == graphs.dump(build())


def test_the_number_of_a_device_is_forgotten() -> None:
    graph = fx.Graph()
    graph.output(graph.call_function(aten.zeros.default, ([2],), {"device": torch.device("cuda", 3)}))
    assert '{"device":"cuda"}' in graphs.dump(graph)
