"""Weight gradients as products: found where they are one, equal to what they stand for, added up in full precision."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from phalanx.engine.gradients import Sum
from phalanx.model.segment import segments
from phalanx.model.segment.compile import Compiler
from phalanx.model.segment.products import Gradient, Product
from tests import captured
from tests.model.test_segments import Call, call, d_outputs_for
from tests.traced import Run

long = pytest.mark.long
LAYERS_IN_MODES = [
    (captured.GPT2, "transformer.h.1", "off"), (captured.GPT2, "transformer.h.1", "aot_eager"),
    (captured.LLAMA, "model.layers.1", "off"), pytest.param(captured.LLAMA, "model.layers.1", "aot_eager", marks=long),
    pytest.param(captured.MIXTRAL, "model.layers.1", "off", marks=long),
    pytest.param(captured.MIXTRAL, "model.layers.1", "aot_eager", marks=long),
]  # fmt: skip


def product(dtype: torch.dtype, seed: int = 0) -> Product:
    generator = torch.Generator().manual_seed(seed)
    left, right = (torch.randn(shape, generator=generator).to(dtype) for shape in ((7, 5), (7, 3)))
    return Product(left.t(), right)


def values(gradients: list[Gradient]) -> list[Tensor | None]:
    return [g.value() if isinstance(g, Product) else g for g in gradients]


def both(it: Call, *, products: bool, mode: str) -> list[list[Gradient]]:
    """Weight gradients of BW, and of B and then W."""
    segment = segments.build(
        it.graph, it.arguments, it.is_parameter, it.wants, compiler=Compiler(mode), products=products
    )
    run, outputs = Run(segment, it.tensors), d_outputs_for(segment)
    run.forward()
    _, fused = run.backward_weight(outputs)
    run.backward(outputs)
    return [fused, run.weight()]


@pytest.mark.parametrize(("name", "block", "mode"), LAYERS_IN_MODES)
def test_every_dense_matrix_is_a_product_that_equals_its_gradient(name: str, block: str, mode: str) -> None:
    it = call(name, block)
    for found, expected in zip(both(it, products=True, mode=mode), both(it, products=False, mode=mode), strict=True):
        names = it.block.names("parameter")
        dense = {n for n, p in zip(names, it.parameters, strict=True) if p.dim() == 2}
        assert {n for n, g in zip(names, found, strict=True) if isinstance(g, Product)} == dense
        assert not any(isinstance(g, Product) for g in expected)
        torch.testing.assert_close(values(found), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_products_are_written_and_added(dtype: torch.dtype) -> None:
    first, second = product(dtype), product(dtype, 1)
    total = torch.empty(5, 3, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    first.write(total)
    second.add_to(total)
    torch.testing.assert_close(total, first.value().to(total.dtype) + second.value().to(total.dtype))


@pytest.mark.parametrize("kinds", ["pp", "pt", "tp", "tt"])
def test_sums_of_products_and_tensors_are_wide_from_the_second_on(kinds: str) -> None:
    parts = [product(torch.bfloat16, seed) for seed in range(2)]
    expected = sum(part.value().float() for part in parts)
    sums = Sum()
    for kind, part in zip(kinds, parts, strict=True):
        sums.add({"a": part if kind == "p" else part.value()})
    assert sums.pieces()["a"].dtype == torch.float32
    torch.testing.assert_close(sums.pieces()["a"], expected)
