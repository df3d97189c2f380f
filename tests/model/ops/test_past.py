"""The buffers of a micro-batch's keys and values, and the handles by which compiled graphs find them."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor

from phalanx.model.ops.slice_attention import Past, Slice

own = torch.ops.phalanx
PLAIN = (None, None, None, None, True, 0.4, 0, 0.0, 0.0)


def tokens(first: int, last: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """[samples, heads, tokens, dim], every token its own number."""
    return torch.arange(first, last, dtype=dtype)[None, None, :, None].expand(2, 3, -1, 4).clone()


def test_what_slices_write_is_read_as_views_of_one_buffer() -> None:
    past = Past(6)
    past.write(0, tokens(0, 4), -tokens(0, 4))
    past.write(4, tokens(4, 6), -tokens(4, 6))
    keys, values = past.read(1, 6)
    assert torch.equal(keys, tokens(1, 6)) and torch.equal(values, -tokens(1, 6))
    assert keys.untyped_storage().data_ptr() == past.read(0, 2)[0].untyped_storage().data_ptr()


def test_a_buffer_lies_token_by_token_and_holds_no_reference_to_what_was_written() -> None:
    past, keys = Past(6), tokens(0, 4)
    past.write(0, keys, keys)
    keys.zero_()
    found, _ = past.read(0, 4)
    assert torch.equal(found, tokens(0, 4)) and found.transpose(1, 2)[0].is_contiguous()


def test_a_slice_that_is_computed_again_leaves_the_others_alone() -> None:
    past = Past(6)
    for start, stop in ((0, 2), (2, 4), (4, 6), (2, 4)):
        past.write(start, tokens(start, stop), tokens(start, stop))
    assert torch.equal(past.read(0, 6)[0], tokens(0, 6))


def test_gradients_that_later_slices_leave_add_up_in_float32() -> None:
    past, one = Past(4), torch.ones(1, 1, 4, 1, dtype=torch.bfloat16)
    past.write(0, one, one)
    past.add_gradients(0, 256 * one, one, torch.float32)
    past.add_gradients(0, one, one, torch.float32)  # lost in bfloat16, which counts in twos from 256 on
    dk, dv = past.gradients(2, 4)
    assert dk.dtype == torch.float32
    assert dk.flatten().tolist() == [257, 257] and dv.flatten().tolist() == [2, 2]


def test_the_buffers_are_freed_when_their_owner_clears_them() -> None:
    past = Past(6)
    slices = [Slice(past, 0), Slice(past, 4)]
    q, k, v = (torch.randn(2, 3, 6, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    parts = [(0, 4), (4, 6)]
    outs = [
        own.attention_slice(*(x[:, :, a:b] for x in (q, k, v)), slice_.handle, *PLAIN)[0]
        for slice_, (a, b) in zip(slices, parts, strict=True)
    ]
    buffer = weakref.ref(past.read(0, 6)[0].untyped_storage())
    outs.pop().sum().backward()
    past.read(0, 6)
    assert past._gradients is not None
    outs.pop().sum().backward()
    past.clear()
    gc.collect()
    assert past._kv is None and past._gradients is None and buffer() is None
    with pytest.raises(AssertionError, match="a slice attends to a past that was never computed"):
        past.read(0, 4)


def test_a_handle_leads_to_its_slice_and_not_to_a_slice_that_is_gone() -> None:
    past = Past(6)
    first, second = Slice(past, 0), Slice(past, 3)
    assert Slice.behind(first.handle) is first and Slice.behind(second.handle.clone()) is second
    handle = first.handle
    del first
    gc.collect()
    with pytest.raises(KeyError):
        Slice.behind(handle)
    assert Slice.behind(second.handle) is second


def test_handles_are_never_used_twice() -> None:
    past = Past(6)
    numbers = {int(Slice(past, 0).handle) for _ in range(5)}
    assert len(numbers) == 5
