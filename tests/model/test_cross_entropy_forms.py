"""The summed cross entropy has two forms, one for compilers that fuse and torch's own for CPUs: they agree."""

from __future__ import annotations

import pytest
import torch

import phalanx.model.ops.operators  # noqa: F401  (defines the operators)
from phalanx.model.ops.cross_entropy import CrossEntropySum


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_form_that_fuses_equals_the_one_for_cpus(dtype: torch.dtype, smoothing: float) -> None:
    generator = torch.Generator().manual_seed(0)
    targets = torch.tensor([3, -100, 0, 10])
    results: list[tuple[torch.Tensor, torch.Tensor]] = []
    given = torch.randn(4, 11, generator=generator).to(dtype)
    for form in (CrossEntropySum.apply, torch.ops.phalanx.cross_entropy_sum):
        logits = given.clone().requires_grad_()
        loss = form(logits, targets, -100, smoothing)
        (gradient,) = torch.autograd.grad(loss, logits, torch.tensor(0.5, dtype=loss.dtype))
        results.append((loss.detach(), gradient))
    (fused, fused_gradient), (plain, plain_gradient) = results
    torch.testing.assert_close(fused, plain)
    torch.testing.assert_close(fused_gradient, plain_gradient)
    assert not plain_gradient[1].any(), "a row that takes no part has no gradient"
