"""Dropout and embeddings on a part equal that part of the whole."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

import phalanx.model.ops.operators  # noqa: F401  (defines the operators)
from phalanx.model.ops import random
from tests import traced

ours = torch.ops.phalanx
sizes = st.integers(1, 5)


@given(samples=sizes, tokens=sizes, parts=sizes, width=st.integers(1, 9), data=st.data())
def test_a_part_of_tokens_and_features_drops_what_the_whole_does(samples, tokens, parts, width, data) -> None:
    part = data.draw(st.integers(0, parts - 1))
    first = data.draw(st.integers(0, width - 1))
    last = data.draw(st.integers(first + 1, width))
    keys = random.sample_keys(0, 3, samples)
    whole = torch.randn(samples, parts * tokens, width, dtype=torch.float64)
    mine = (slice(None), slice(part * tokens, (part + 1) * tokens), slice(first, last))
    dropped = ours.dropout_part(whole[mine], keys, 0.4, part, first)
    assert torch.equal(dropped, ours.dropout(whole, keys, 0.4)[mine])
    together = ours.dropout_part(whole[mine].reshape(samples * tokens, last - first), keys, 0.4, part, first)
    assert torch.equal(together.reshape(dropped.shape), dropped)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_gradient_of_a_traced_part_of_a_dropout_is_that_part_of_the_whole_s(dtype: torch.dtype) -> None:
    keys = random.sample_keys(0, 0, 2)
    whole, d_whole = (torch.randn(2, 6, 8).to(dtype) for _ in range(2))
    leaf = whole.clone().requires_grad_()
    out = ours.dropout(leaf, keys, 0.3)
    (expected,) = torch.autograd.grad(out, leaf, d_whole)
    mine = (slice(None), slice(3, 6), slice(5, 8))
    arguments = (whole[mine].contiguous(), keys, 0.3, 1, 5)
    got_out, got = traced.gradients(ours.dropout_part, *arguments, d_out=d_whole[mine].contiguous())
    assert got_out.dtype == dtype
    torch.testing.assert_close(got_out, out[mine].detach())
    torch.testing.assert_close(got, expected[mine])


def summed(weight: Tensor, ids: Tensor, bounds: list[int], padding: int = -1) -> Tensor:
    return torch.stack([ours.embedding_part(weight[a:b], ids, a, padding) for a, b in pairwise(bounds)]).sum(0)


@given(rows=st.integers(1, 11), cuts=st.lists(st.integers(0, 11), max_size=3), padded=st.booleans(), data=st.data())
def test_the_parts_of_an_embedding_add_up_to_the_whole_in_both_directions(rows, cuts, padded, data) -> None:
    ids = torch.tensor(data.draw(st.lists(st.integers(0, rows - 1), min_size=6, max_size=6))).reshape(2, 3)
    padding = data.draw(st.integers(0, rows - 1)) if padded else -1
    bounds = [0, *sorted(min(cut, rows) for cut in cuts), rows]
    weight = torch.randn(rows, 4, dtype=torch.float64, requires_grad=True)
    whole = torch.embedding(weight, ids, padding)
    parts = summed(weight, ids, bounds, padding)
    assert torch.equal(whole, parts)
    d_out = torch.randn_like(whole)
    expected, got = (torch.autograd.grad(out, weight, d_out)[0] for out in (whole, parts))
    torch.testing.assert_close(got, expected)


def test_ids_of_other_parts_give_zeros_and_no_gradient_even_where_one_arrives() -> None:
    weight = torch.full((3, 2), float("nan"), requires_grad=True)
    out = ours.embedding_part(weight, torch.tensor([0, 4, 8, 100]), 5)
    assert torch.equal(out, torch.zeros(4, 2))
    assert not torch.autograd.grad(out, weight, torch.full((4, 2), float("inf")))[0].any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_traced_part_of_an_embedding_equals_those_rows_of_the_whole(dtype: torch.dtype) -> None:
    weight, ids = torch.randn(7, 4).to(dtype), torch.tensor([[0, 3, 6], [4, 4, 2]])
    leaf = weight.clone().requires_grad_()
    d_out = torch.randn(2, 3, 4).to(dtype)
    (expected,) = torch.autograd.grad(functional.embedding(ids, leaf), leaf, d_out)
    out, got = traced.gradients(ours.embedding_part, weight[3:6], ids, 3, d_out=d_out)
    assert out.dtype == dtype
    torch.testing.assert_close(out, torch.where(((ids >= 3) & (ids < 6))[..., None], weight[ids], 0.0))
    torch.testing.assert_close(got, expected[3:6])


def test_a_part_without_rows_has_zeros_and_a_backward() -> None:
    out, gradient = traced.gradients(
        ours.embedding_part, torch.empty(0, 4), torch.tensor([[1, 2]]), 3, d_out=torch.ones(1, 2, 4)
    )
    assert torch.equal(out, torch.zeros(1, 2, 4))
    assert gradient.shape == (0, 4)
