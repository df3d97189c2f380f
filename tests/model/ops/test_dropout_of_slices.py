"""A slice of the tokens drops what the whole micro-batch drops there."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from phalanx.model.ops import operators  # noqa: F401  (defines what is tested)
from tests import traced

ours = torch.ops.phalanx
SAMPLES, TOKENS, FEATURES = 2, 12, 5
KEYS = torch.tensor([31, 77])


def activation() -> torch.Tensor:
    shape = (SAMPLES, TOKENS, FEATURES)
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@given(inner=st.sets(st.integers(1, TOKENS - 1)))
def test_slices_drop_what_the_whole_drops(inner: set[int]) -> None:
    x, edges = activation(), [0, *sorted(inner), TOKENS]
    parts = [ours.dropout_part(x[:, a:b], KEYS, 0.4, 0, 0, torch.tensor(a)) for a, b in pairwise(edges)]
    dropped = ours.dropout(x, KEYS, 0.4)
    assert torch.equal(torch.cat(parts, dim=1), dropped)
    assert 0 < int((dropped == 0).sum()) < x.numel()


@given(start=st.integers(0, 8), rank=st.integers(0, 1), first=st.integers(0, 3))
def test_ranks_that_share_the_tokens_of_a_slice_count_from_its_first_token(start: int, rank: int, first: int) -> None:
    x, half = activation(), slice(start + 2 * rank, start + 2 * rank + 2)  # each of two ranks has two of four tokens
    part = ours.dropout_part(x[:, half, first:], KEYS, 0.4, rank, first, torch.tensor(start))
    assert torch.equal(part, ours.dropout(x, KEYS, 0.4)[:, half, first:])


def test_samples_and_tokens_may_lie_in_one_dim() -> None:
    x = activation()[:, 3:7]
    apart = ours.dropout_part(x, KEYS, 0.4, 0, 0, torch.tensor(3))
    together = ours.dropout_part(x.flatten(0, 1), KEYS, 0.4, 0, 0, torch.tensor(3))
    assert torch.equal(together, apart.flatten(0, 1))


@pytest.mark.parametrize("mode", ["off", "aot_eager"])
def test_where_a_slice_begins_is_no_constant_of_a_traced_graph(mode: str) -> None:
    x = activation()
    dropped = ours.dropout(x, KEYS, 0.4)
    for start in (0, 4, 8):
        part, d_out = x[:, start : start + 4].contiguous(), torch.ones(SAMPLES, 4, FEATURES, dtype=torch.float64)
        arguments = (part, KEYS, 0.4, 0, 0, torch.tensor(start))
        out, d_part = traced.gradients(ours.dropout_part, *arguments, d_out=d_out, mode=mode)
        assert torch.equal(out, dropped[:, start : start + 4])
        torch.testing.assert_close(d_part, (out != 0) / torch.tensor(0.6, dtype=torch.float64))
