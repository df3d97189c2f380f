"""Keyed dropout and the summed cross entropy against PyTorch's own."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

import phalanx.model.ops.operators  # noqa: F401  (defines the operators)
from phalanx.model.ops import random

cross_entropy_sum, dropout = torch.ops.phalanx.cross_entropy_sum, torch.ops.phalanx.dropout


@given(
    rows=st.integers(1, 9), classes=st.integers(2, 11), smoothing=st.sampled_from([0.0, 0.1, 0.5]),
    ignore=st.sampled_from([-100, 0, 1]), seed=st.integers(0, 1000),
)  # fmt: skip
def test_value_and_gradient_equal_torch_cross_entropy(rows, classes, smoothing, ignore, seed) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = (5 * torch.randn(rows, classes, generator=generator, dtype=torch.float64)).requires_grad_()
    targets = torch.randint(0, classes, (rows,), generator=generator)
    targets[torch.rand(rows, generator=generator) < 0.3] = ignore
    ours = cross_entropy_sum(logits, targets, ignore, smoothing)
    theirs = functional.cross_entropy(logits, targets, ignore_index=ignore, label_smoothing=smoothing, reduction="sum")
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    got, expected = (torch.autograd.grad(3 * loss, logits)[0] for loss in (ours, theirs))
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def test_large_logits_do_not_overflow() -> None:
    logits = torch.tensor([[1e4, -1e4, 0.0]], requires_grad=True)
    loss = cross_entropy_sum(logits, torch.tensor([1]), -100, 0.0)
    assert loss.item() == 2e4
    assert torch.autograd.grad(loss, logits)[0].tolist() == [[1.0, -1.0, 0.0]]


@pytest.mark.parametrize("classes", [63, 64, 640, 1024, 2048, 50257])
@pytest.mark.parametrize("masked", [False, True])
def test_every_number_of_classes_gives_the_same_loss_as_torch(classes: int, masked: bool) -> None:
    generator = torch.Generator().manual_seed(classes)
    far = -1000.0  # exp underflows there: what is masked must not count as zero
    logits = far + 5 * torch.randn(5, classes, generator=generator, dtype=torch.float64)
    if masked:
        logits[1, : classes - classes % 64 - 3] = float("-inf")
        logits[2, 1:] = float("-inf")
    logits.requires_grad_()
    targets = torch.tensor([0, classes - 1, 0, -100, classes // 2])
    ours = cross_entropy_sum(logits, targets, -100, 0.0)
    theirs = functional.cross_entropy(logits, targets, reduction="sum")
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-11)
    got, expected = (torch.autograd.grad(loss, logits)[0] for loss in (ours, theirs))
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)


def test_bfloat16_logits_are_summed_in_float32() -> None:
    logits = torch.randn(300, 50, generator=torch.Generator().manual_seed(0)).bfloat16().requires_grad_()
    targets = torch.arange(300) % 50
    ours = cross_entropy_sum(logits, targets, -100, 0.1)
    wide = functional.cross_entropy(logits.float(), targets, label_smoothing=0.1, reduction="sum")
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, wide, rtol=1e-6, atol=0)
    got, expected = (torch.autograd.grad(loss, logits)[0] for loss in (ours, wide))
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got, expected, rtol=1e-2, atol=1e-4)


def test_only_ignored_rows_give_zero_and_no_gradient() -> None:
    logits = torch.randn(3, 4, requires_grad=True)
    loss = cross_entropy_sum(logits, torch.full((3,), -100), -100, 0.0)
    assert loss.item() == 0
    assert not torch.autograd.grad(loss, logits)[0].any()


def test_a_label_outside_the_classes_is_an_error_and_not_a_number() -> None:
    with pytest.raises((IndexError, RuntimeError), match="out of"):
        cross_entropy_sum(torch.randn(2, 4), torch.tensor([1, 4]), -100, 0.0)


def test_dropout_zeroes_what_its_keys_say_and_scales_the_rest_in_both_directions() -> None:
    x = torch.randn(2, 3, 8, dtype=torch.float64, requires_grad=True)
    keys = random.sample_keys(0, 0, 2)
    factor = random.keep_features(keys, x.shape, 0.25).double() / 0.75
    out = dropout(x, keys, 0.25)
    torch.testing.assert_close(out, x * factor)
    torch.testing.assert_close(torch.autograd.grad(out.sum(), x)[0], factor)


def test_dropping_everything_gives_zeros_without_dividing_by_zero() -> None:
    assert torch.equal(dropout(torch.ones(2, 3), random.sample_keys(0, 0, 2), 1.0), torch.zeros(2, 3))
