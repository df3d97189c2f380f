"""Cross entropy on split logits: the parts joined equal the whole, in both directions and in every form."""

from __future__ import annotations

import contextlib
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from phalanx.model.ops.operators import as_on_gpu
from tests import traced

ours = torch.ops.phalanx
FORMS = {"cpu": contextlib.nullcontext, "gpu": as_on_gpu}
MASKED = float("-inf")


def joined(logits: Tensor, targets: Tensor, bounds: list[int], ignore: int, smoothing: float) -> Tensor:
    statistics = [ours.cross_entropy_part(logits[:, a:b], targets, a, ignore, smoothing) for a, b in pairwise(bounds)]
    return ours.cross_entropy_join(torch.stack(statistics), targets, ignore, smoothing, logits.shape[1])


def require_equal(logits: Tensor, targets: Tensor, bounds: list[int], ignore: int = -100, smoothing: float = 0.0):
    leaf = logits.clone().requires_grad_()
    theirs = functional.cross_entropy(leaf, targets, ignore_index=ignore, label_smoothing=smoothing, reduction="sum")
    (expected,) = torch.autograd.grad(3 * theirs, leaf)
    for form in FORMS.values():
        with form():
            loss = joined(leaf, targets, bounds, ignore, smoothing)
            (got,) = torch.autograd.grad(3 * loss, leaf)
        torch.testing.assert_close(loss, theirs, rtol=1e-12, atol=1e-11)
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)


@given(
    rows=st.integers(1, 6), classes=st.integers(2, 13), cuts=st.lists(st.integers(0, 13), max_size=3),
    smoothing=st.sampled_from([0.0, 0.1, 0.5]), ignore=st.sampled_from([-100, 0, 1]), seed=st.integers(0, 1000),
)  # fmt: skip
def test_any_parts_joined_equal_the_whole(rows, classes, cuts, smoothing, ignore, seed) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = 5 * torch.randn(rows, classes, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, classes, (rows,), generator=generator)
    targets[torch.rand(rows, generator=generator) < 0.3] = ignore
    bounds = [0, *sorted(min(cut, classes) for cut in cuts), classes]
    require_equal(logits, targets, bounds, ignore, smoothing)


@pytest.mark.parametrize("bounds", [[0, 128, 256], [0, 192, 320], [0, 25129, 50257]])
def test_parts_that_are_masked_as_a_whole_count_nothing(bounds: list[int]) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = -1000 + 5 * torch.randn(4, bounds[-1], generator=generator, dtype=torch.float64)
    logits[0, : bounds[1]] = MASKED
    logits[1, bounds[1] :] = MASKED
    logits[2, 1:] = MASKED
    require_equal(logits, torch.tensor([bounds[1], 0, 0, -100]), bounds)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_bfloat16_logits_give_float32_statistics_and_bfloat16_gradients(form: str, smoothing: float) -> None:
    logits = torch.randn(300, 50, generator=torch.Generator().manual_seed(0)).bfloat16().requires_grad_()
    targets = torch.arange(300) % 50
    wide = functional.cross_entropy(logits.float(), targets, label_smoothing=smoothing, reduction="sum")
    with FORMS[form]():
        loss = joined(logits, targets, [0, 17, 50], -100, smoothing)
        got, expected = (torch.autograd.grad(each, logits)[0] for each in (loss, wide))
    assert (loss.dtype, got.dtype) == (torch.float32, torch.bfloat16)
    torch.testing.assert_close(loss, wide, rtol=1e-6, atol=0)
    torch.testing.assert_close(got, expected, rtol=1e-2, atol=1e-4)


def test_statistics_are_two_numbers_per_row_and_three_with_smoothing() -> None:
    logits, targets = torch.tensor([[0.0, 0.0], [1.0, MASKED]]), torch.tensor([5, 9])
    log_2 = torch.tensor(2.0).log().item()
    plain = ours.cross_entropy_part(logits, targets, 4, -100, 0.0)
    torch.testing.assert_close(plain, torch.tensor([[log_2, 0.0], [1.0, 0.0]]))
    smooth = ours.cross_entropy_part(logits + 2, targets, 4, -100, 0.1)
    torch.testing.assert_close(smooth, torch.tensor([[log_2 + 2, 2.0, 4.0], [3.0, 0.0, MASKED]]))


@pytest.mark.parametrize("label", [4, -1])
def test_a_label_that_no_part_has_is_an_error_and_not_a_number(label: int) -> None:
    with pytest.raises((IndexError, RuntimeError), match="out of"):
        joined(torch.randn(2, 4), torch.tensor([1, label]), [0, 2, 4], -100, 0.0)


def test_only_ignored_rows_give_zero_and_no_gradient() -> None:
    logits = torch.randn(3, 4, requires_grad=True)
    loss = joined(logits, torch.full((3,), -100), [0, 2, 4], -100, 0.1)
    assert loss.item() == 0
    assert not torch.autograd.grad(loss, logits)[0].any()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_traced_parts_and_their_join_equal_the_whole(form: str, smoothing: float) -> None:
    """As ranks do it: statistics forward, the join, its gradient, and that of each part."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 11, generator=generator, dtype=torch.float64)
    logits[1, :6] = MASKED if not smoothing else 0.0
    targets, bounds, grad = torch.tensor([3, 7, -100, 10, 0]), [0, 6, 11], torch.tensor(0.5, dtype=torch.float64)
    leaf = logits.clone().requires_grad_()
    whole = ours.cross_entropy_sum(leaf, targets, -100, smoothing)
    (expected,) = torch.autograd.grad(whole, leaf, grad)
    with FORMS[form]():
        calls = [(logits[:, a:b].contiguous(), targets, a, -100, smoothing) for a, b in pairwise(bounds)]
        statistics = torch.stack([ours.cross_entropy_part(*call) for call in calls])
        loss, d_statistics = traced.gradients(
            ours.cross_entropy_join, statistics, targets, -100, smoothing, 11, d_out=grad
        )
        for number, call in enumerate(calls):
            again, d_logits = traced.gradients(ours.cross_entropy_part, *call, d_out=d_statistics[number])
            torch.testing.assert_close(again, statistics[number])
            torch.testing.assert_close(d_logits, expected[:, bounds[number] : bounds[number + 1]])
    torch.testing.assert_close(loss, whole.detach())


@pytest.mark.parametrize("form", FORMS)
def test_no_wide_copy_of_the_logits_is_kept(form: str) -> None:
    logits = torch.randn(4, 64).bfloat16().requires_grad_()
    kept: list[Tensor] = []
    with FORMS[form](), torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        joined(logits, torch.arange(4), [0, 64], -100, 0.1)
    assert [t.dtype for t in kept if t.numel() >= logits.numel()] == [torch.bfloat16]
