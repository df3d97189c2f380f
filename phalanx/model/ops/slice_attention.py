"""Attention of a slice: to all tokens before it, and causally to itself.

Keys and values of the tokens before it lie in buffers that live as long as a micro-batch's slices do. An attention
operator in a compiled graph gets a *handle*, a number in a tensor, and finds the slice behind it here: so no length of
a past is ever a constant of a graph, and nothing of a past is copied or joined to attend to it. Where a fused kernel
can do both parts they are done apart and merged by their log-sum-exp; everything else is done at once on a view of the
buffers.
"""

from __future__ import annotations

import itertools
import weakref
from dataclasses import replace

import torch
from torch import Tensor

from phalanx.model.ops.choice import choose
from phalanx.model.ops.kernels import Attention, accumulation_dtype


class Past:
    """One attention of one micro-batch: keys and values of the first `filled` of `tokens` tokens, and, on the way back,
    the gradients that later slices left for them, in float32 at least."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self._kv: tuple[Tensor, Tensor] | None = None
        self._gradients: tuple[Tensor, Tensor] | None = None

    def write(self, start: int, k: Tensor, v: Tensor) -> None:
        """k, v: [samples, heads, tokens of the slice, dim]."""
        if self._kv is None:
            self._kv = _buffer(k, self.tokens), _buffer(v, self.tokens)
        for buffer, own in zip(self._kv, (k, v), strict=True):
            buffer[:, :, start : start + own.shape[2]] = own

    def read(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Views of the keys and values of tokens start … stop - 1."""
        assert self._kv is not None, "a slice attends to a past that was never computed"
        keys, values = self._kv
        return keys[:, :, start:stop], values[:, :, start:stop]

    def add_gradients(self, start: int, dk: Tensor, dv: Tensor, wide: torch.dtype) -> None:
        if self._gradients is None:
            assert self._kv is not None
            self._gradients = tuple(torch.zeros_like(x, dtype=wide) for x in self._kv)  # pyright: ignore
        for buffer, new in zip(self._gradients, (dk, dv), strict=True):  # pyright: ignore
            buffer[:, :, start : start + new.shape[2]] += new

    def gradients(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Of the tokens start … stop - 1, once no later slice adds to them."""
        assert self._gradients is not None
        dk, dv = self._gradients
        return dk[:, :, start:stop], dv[:, :, start:stop]

    @property
    def num_bytes(self) -> int:
        return sum(x.nbytes for pair in (self._kv, self._gradients) if pair is not None for x in pair)

    def clear(self) -> None:
        """For who owns it: nobody reads it any more."""
        self._kv = self._gradients = None


class Slice:
    """The tokens of an attention's micro-batch from `start` on. `handle` names it in a graph."""

    _numbers = itertools.count()
    _alive: weakref.WeakValueDictionary[int, Slice] = weakref.WeakValueDictionary()

    def __init__(self, past: Past, start: int) -> None:
        self.past, self.start = past, start
        number = next(self._numbers)
        self.handle = torch.tensor(number)
        self._alive[number] = self

    @classmethod
    def behind(cls, handle: Tensor) -> Slice:
        return cls._alive[int(handle)]


def _buffer(like: Tensor, tokens: int) -> Tensor:
    """[samples, heads, tokens, dim], laid out token by token, as kernels read it best."""
    samples, heads, _, dim = like.shape
    return like.new_zeros(samples, tokens, heads, dim).transpose(1, 2)


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
