"""The grouped matrix product against a loop over rows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from phalanx.model.ops.operators import grouped_matmul


def row_by_row(x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    experts = torch.bucketize(torch.arange(len(x)), offsets, right=True)
    return torch.stack([row @ weight[expert] for row, expert in zip(x, experts, strict=True)])


@given(sizes=st.lists(st.integers(0, 4), min_size=1, max_size=5).filter(sum), transposed=st.booleans())
def test_value_and_gradients_equal_a_loop_also_for_experts_without_rows(sizes: list[int], transposed: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(sum(sizes), 3, generator=generator, dtype=torch.float64)
    weight = torch.randn(len(sizes), 3, 5, generator=generator, dtype=torch.float64)
    if transposed:
        weight = weight.transpose(-1, -2).contiguous().transpose(-1, -2)
    offsets = torch.tensor(sizes).cumsum(0).to(torch.int32)

    def gradients(function):
        leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
        out = function(*leaves, offsets)
        return [out.detach(), *torch.autograd.grad(out.square().sum(), leaves)]

    for got, expected in zip(gradients(grouped_matmul), gradients(row_by_row), strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_it_is_a_well_behaved_custom_operator_in_every_dtype(dtype: torch.dtype) -> None:
    x, weight = torch.randn(6, 4, dtype=dtype), torch.randn(3, 4, 5, dtype=dtype)
    offsets = torch.tensor([2, 2, 6], dtype=torch.int32)
    assert grouped_matmul(x, weight, offsets).dtype == dtype
    torch.library.opcheck(grouped_matmul, (x.requires_grad_(), weight.requires_grad_(), offsets))
