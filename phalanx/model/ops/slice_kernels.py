"""Attention of a slice: to all tokens before it, and causally to itself.

Where a fused kernel can do both parts they are done apart and merged by their log-sum-exp; everything else is done at
once on a view of the buffers. Nothing of the past is copied.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from phalanx.model.ops.choice import choose
from phalanx.model.ops.kernels import Attention, accumulation_dtype
from phalanx.model.ops.past import Slice


def forward(q: Tensor, k: Tensor, v: Tensor, slice_: Slice, spec: Attention) -> tuple[Tensor, Tensor]:
    start, stop = slice_.start, slice_.start + q.shape[2]
    spec = spec.among(stop)
    slice_.past.write(start, k, v)
    if start == 0:
        first = _placed(spec, 0, 0, stop)
        return choose(q, k, v, first).forward(q, k, v, first)
    if spec.plain:
        before = slice_.past.read(0, start)
        own = slice_.past.read(start, stop)
        full = replace(spec, causal=False)
        out, lse = choose(q, *before, full).forward(q, *before, full)
        own_out, own_lse = choose(q, *own, spec).forward(q, *own, spec)
        return merge(out, lse, own_out, own_lse)
    first = _first_key(start, spec)
    keys, values = slice_.past.read(first, stop)
    placed = _placed(spec, start, first, stop)
    return choose(q, keys, values, placed).forward(q, keys, values, placed)


def backward(
    d_out: Tensor, q: Tensor, out: Tensor, lse: Tensor, slice_: Slice, spec: Attention
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of q and of the slice's own keys and values, to which later slices have added theirs; those of the past
    are left there for earlier slices."""
    start, stop, past = slice_.start, slice_.start + q.shape[2], slice_.past
    spec = spec.among(stop)
    wide = accumulation_dtype(q.dtype)
    d_bias = None
    if spec.plain:
        own = past.read(start, stop)
        dq, dk, dv, _ = choose(q, *own, spec).backward(d_out, q, *own, out, lse, spec)
        past.add_gradients(start, dk, dv, wide)
        if start:
            before, full = past.read(0, start), replace(spec, causal=False)
            more, dk, dv, _ = choose(q, *before, full).backward(d_out, q, *before, out, lse, full)
            past.add_gradients(0, dk, dv, wide)
            dq = dq + more
    else:
        first = _first_key(start, spec)
        keys, values = past.read(first, stop)
        placed = _placed(spec, start, first, stop)
        dq, dk, dv, part = choose(q, keys, values, placed).backward(d_out, q, keys, values, out, lse, placed)
        past.add_gradients(first, dk, dv, wide)
        if part is not None and spec.bias is not None:
            d_bias = _whole_bias(part, spec.bias, start, first, stop)
    dk, dv = past.gradients(start, stop)
    return dq, dk.to(q.dtype), dv.to(q.dtype), d_bias


def merge(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Attention to two sets of keys from attention to each."""
    total = torch.logaddexp(lse, other_lse)
    wide = total.dtype
    merged = out.to(wide) * (lse - total).exp()[..., None] + other.to(wide) * (other_lse - total).exp()[..., None]
    return merged.to(out.dtype), total


def _first_key(start: int, spec: Attention) -> int:
    """Keys before the window of the first query are not looked at. What is dropped is numbered from the first key."""
    return max(0, start - spec.window + 1) if spec.window and spec.causal and not spec.dropout else 0


def _placed(spec: Attention, start: int, first: int, stop: int) -> Attention:
    """What of masks and biases, which are whole, belongs to queries from `start` and keys first … stop - 1."""
    bias = spec.bias
    if bias is not None:
        rows = slice(None) if bias.shape[2] == 1 else slice(start, stop)
        bias = bias[:, :, rows, first:stop] if bias.shape[3] != 1 else bias[:, :, rows]
    k_segments = None if spec.k_segments is None else spec.k_segments[:, first:stop]
    return replace(spec, bias=bias, k_segments=k_segments, first_query=torch.tensor(start))


def _whole_bias(part: Tensor, bias: Tensor, start: int, first: int, stop: int) -> Tensor:
    whole = torch.zeros_like(bias)
    rows = slice(None) if bias.shape[2] == 1 else slice(start, stop)
    columns = slice(None) if bias.shape[3] == 1 else slice(first, stop)
    whole[:, :, rows, columns] = part
    return whole
