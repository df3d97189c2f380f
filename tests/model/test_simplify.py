"""Simplified graphs compute the same with fewer calls."""

from __future__ import annotations

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from phalanx.model.segment.joint import settle_strides, simplify

aten = torch.ops.aten


def _targets(graph: fx.Graph) -> list[object]:
    return [node.target for node in graph.nodes if node.op == "call_function"]


def test_what_computes_nothing_is_taken_out() -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = aten.mm(aten.detach(x), aten.t(aten.t(w)))
        return aten.pow(y, 1.0) + aten.view(x, [4]).sum(), aten.view(x, [4]) * 2

    x, w = torch.randn(2, 2), torch.randn(2, 2)
    module = make_fx(function)(x, w)
    expected = module(x, w)
    simplify(module.graph)
    module.graph.eliminate_dead_code()
    module.recompile()
    for got, wanted in zip(module(x, w), expected, strict=True):
        assert torch.equal(got, wanted)
    left = _targets(module.graph)
    assert aten.detach.default not in left and aten.pow.Tensor_Scalar not in left
    assert left.count(aten.view.default) == 1 and left.count(aten.t.default) == 0


def test_an_output_keeps_its_own_node() -> None:
    module = make_fx(lambda x: aten.detach(x))(torch.randn(3))
    simplify(module.graph)
    assert _targets(module.graph) == [aten.detach.default]


def test_what_torch_foretells_of_memory_layouts_comes_true() -> None:
    """Of the gradient of softplus it does not, where the gradient that comes is transposed."""

    def function(gradient: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return aten.softplus_backward(aten.transpose(gradient, 0, 1), x, 1, 20)

    arguments = torch.randn(3, 4), torch.randn(4, 3)
    module = make_fx(function, tracing_mode="fake")(*arguments)
    expected = module(*arguments)
    settle_strides(module.graph)
    module.recompile()
    (foretold,) = (n.meta["val"].stride() for n in module.graph.nodes if n.target is aten.softplus_backward.default)
    found = module(*arguments)
    assert found.stride() == foretold != expected.stride()
    torch.testing.assert_close(found, expected)  # another layout may round otherwise
