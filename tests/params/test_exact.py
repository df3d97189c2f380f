"""Sums that come out the same in whatever order they are made."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from phalanx.params import exact

seeds = st.integers(0, 2**31)


def gradients(seed: int, count: int = 12, shape: tuple[int, ...] = (5, 7)) -> list[Tensor]:
    """Of very different sizes, so that plain sums depend on their order."""
    random = torch.Generator().manual_seed(seed)
    powers = [torch.randint(-20, 16, shape, generator=random) for _ in range(count)]
    return [torch.randn(shape, generator=random) * 2.0**power for power in powers]


def summed(found: list[Tensor]) -> Tensor:
    total = exact.zeros_like(found[0])
    for own in found:
        exact.add(total, own)
    return total


@given(seeds, st.integers(1, 11))
def test_a_sum_of_gradients_does_not_depend_on_order_or_parts(seed: int, cut: int) -> None:
    found = gradients(seed)
    whole = summed(found)
    order = torch.randperm(len(found), generator=torch.Generator().manual_seed(seed)).tolist()
    mixed = [found[i] for i in order]
    first, second = summed(mixed[:cut]), summed(mixed[cut:])
    assert torch.equal(exact.numbers(first) + exact.numbers(second), exact.numbers(whole))
    expected = torch.stack(found).double().sum(0)
    torch.testing.assert_close(exact.value(whole, torch.float64), expected, rtol=1e-12, atol=2**-57)


def test_plain_sums_of_these_gradients_do_depend_on_it() -> None:
    forth, back = torch.zeros(5, 7), torch.zeros(5, 7)
    for one, other in zip(gradients(0), reversed(gradients(0)), strict=True):
        forth, back = forth + one, back + other
    assert not torch.equal(forth, back)


def test_a_small_float32_keeps_all_its_bits() -> None:
    small = torch.tensor([1e-11, -3.3e-9, 1.0, 65432.1])
    assert torch.equal(exact.value(summed([small]), torch.float32), small)


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf, exact.LARGEST, -3.0 * exact.LARGEST])
def test_what_is_not_finite_or_too_large_stays_visible(wrong: float) -> None:
    total = summed([torch.ones(3), torch.tensor([0.0, wrong, 1.0]), torch.ones(3)])
    assert exact.value(total, torch.float32).isfinite().tolist() == [True, False, True]
    assert not exact.total(exact.words_of_squares(exact.value(total, torch.float32))).isfinite()


@given(seeds, st.integers(1, 400))
def test_sums_of_squares_and_losses_do_not_depend_on_who_adds_what(seed: int, size: int) -> None:
    values = torch.cat([own.reshape(-1) for own in gradients(seed, shape=(35,))])
    mixed = values[torch.randperm(len(values), generator=torch.Generator().manual_seed(seed))]
    for words in (exact.words, exact.words_of_squares):
        alone, like = exact.together([words(values)], values), values
        # As an all-reduce adds them up: without carrying in between.
        parts = torch.stack([exact.together([words(own)], like) for own in mixed.split(size)]).sum(0)
        assert torch.equal(exact.total(parts), exact.total(alone))
    expected = values.double().square().sum()
    torch.testing.assert_close(exact.total(exact.words_of_squares(values)), expected, rtol=1e-12, atol=0.0)
    torch.testing.assert_close(exact.total(exact.words(values)), values.double().sum(), rtol=1e-9, atol=1e-9)


def test_no_tensors_make_zero() -> None:
    assert exact.total(exact.together([], torch.zeros(()))).item() == 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_added_up_is_left_as_it_is(dtype: torch.dtype) -> None:
    value = torch.randn(9, dtype=dtype)
    before = value.clone()
    exact.add(exact.zeros_like(value), value)
    exact.words(value)
    exact.words_of_squares(value)
    assert torch.equal(value, before)
