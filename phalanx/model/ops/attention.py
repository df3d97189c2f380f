"""The one attention operator that every model goes through: `phalanx::attention` and its explicit backward.

It never materialises a mask for causal or full attention. Padding and packed documents are *segment* ids per token
(0 = padding; a query attends to keys of its own segment). The forward returns the log-sum-exp beside the output, so
that the backward, and later the merging of parts of the past, need nothing else. Which device kernel does the work is
decided in `choice.py`; how a HuggingFace model is made to call this operator is in `graph/hooks.py`.

Shapes: q [batch, heads, queries, dim]; k, v [batch, kv_heads, keys, dim]; q_segments [batch, queries];
k_segments [batch, keys]; bias broadcastable to [batch, heads, queries, keys]; dropout_keys [batch];
out like q; lse [batch, heads, queries]. Where heads are split over ranks, first_head says which of them q's first is.
"""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx.model.ops import slice_attention
from phalanx.model.ops.choice import choose
from phalanx.model.ops.kernels import Attention, accumulation_dtype
from phalanx.model.ops.own import own_op
from phalanx.model.ops.slice_attention import Slice

_OPTIONS = "bool causal, float scale, int window, float softcap, float dropout, int first_head=0"
_FROM = "Tensor? first_query=None"
_MASKS = "Tensor? q_segments, Tensor? k_segments, Tensor? bias, Tensor? dropout_keys"
_FORWARD = f"(Tensor q, Tensor k, Tensor v, {_MASKS}, {_OPTIONS}, {_FROM}) -> (Tensor, Tensor)"
_BACKWARD = (
    f"(Tensor d_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, {_MASKS}, {_OPTIONS}, {_FROM})"
    " -> (Tensor, Tensor, Tensor, Tensor)"
)


def _token_major(x: Tensor) -> Tensor:
    """The same values laid out as [batch, tokens, heads, dim], so that joining the heads afterwards copies nothing."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _empty_like_tokens(x: Tensor) -> Tensor:
    batch, heads, tokens, dim = x.shape
    return x.new_empty(batch, tokens, heads, dim).transpose(1, 2)


@own_op("attention", _FORWARD)
def attention(q, k, v, *options) -> tuple[Tensor, Tensor]:
    spec = Attention(*options).among(k.shape[2])
    out, lse = choose(q, k, v, spec).forward(q, k, v, spec)
    return _token_major(out), lse.contiguous()


@own_op("attention_backward", _BACKWARD)
def attention_backward(d_out, q, k, v, out, lse, *options) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    spec = Attention(*options).among(k.shape[2])
    dq, dk, dv, d_bias = choose(q, k, v, spec).backward(d_out, q, k, v, out, lse, spec)
    d_bias = q.new_empty(0) if d_bias is None else d_bias.contiguous()
    return _token_major(dq), _token_major(dk), _token_major(dv), d_bias


@attention.register_fake
def _(q, k, v, *options):
    lse = q.new_empty(q.shape[:3], dtype=accumulation_dtype(q.dtype))
    batch, heads, queries, _ = q.shape
    return q.new_empty(batch, queries, heads, v.shape[-1]).transpose(1, 2), lse


@attention_backward.register_fake
def _(d_out, q, k, v, out, lse, q_segments, k_segments, bias, *options):
    d_bias = q.new_empty(0) if bias is None else torch.empty_like(bias, memory_format=torch.contiguous_format)
    return _empty_like_tokens(q), _empty_like_tokens(k), _empty_like_tokens(v), d_bias


def _setup_context(ctx, inputs, output) -> None:
    q, k, v, q_segments, k_segments, bias, dropout_keys, *options = inputs
    out, lse = output
    ctx.save_for_backward(q, k, v, out, lse, q_segments, k_segments, bias, dropout_keys)
    ctx.options = options
    ctx.mark_non_differentiable(lse)


def _autograd_backward(ctx, d_out, d_lse):
    grads = torch.ops.phalanx.attention_backward(d_out, *ctx.saved_tensors, *ctx.options)
    dq, dk, dv, d_bias = grads
    return dq, dk, dv, None, None, d_bias if ctx.needs_input_grad[5] else None, None, *[None] * len(ctx.options)


attention.register_autograd(_autograd_backward, setup_context=_setup_context)


# The same for a slice of the tokens: its handle leads to the keys and values of those before it.

_SLICE_FORWARD = f"(Tensor q, Tensor k, Tensor v, Tensor handle, {_MASKS}, {_OPTIONS}) -> (Tensor, Tensor)"
_SLICE_BACKWARD = (
    f"(Tensor d_out, Tensor q, Tensor out, Tensor lse, Tensor handle, {_MASKS}, int kv_heads, int value_dim, "
    f"{_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor)"
)


@own_op("attention_slice", _SLICE_FORWARD)
def attention_slice(q, k, v, handle, *options) -> tuple[Tensor, Tensor]:
    out, lse = slice_attention.forward(q, k, v, Slice.behind(handle), Attention(*options))
    return _token_major(out), lse.contiguous()


@own_op("attention_slice_backward", _SLICE_BACKWARD)
def attention_slice_backward(
    d_out, q, out, lse, handle, q_segments, k_segments, bias, dropout_keys, kv_heads, value_dim, *options
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    spec = Attention(q_segments, k_segments, bias, dropout_keys, *options)
    dq, dk, dv, d_bias = slice_attention.backward(d_out, q, out, lse, Slice.behind(handle), spec)
    d_bias = q.new_empty(0) if d_bias is None else d_bias.contiguous()
    return _token_major(dq), _token_major(dk), _token_major(dv), d_bias


@attention_slice.register_fake
def _(q, k, v, handle, *options):
    batch, heads, queries, _ = q.shape
    lse = q.new_empty(q.shape[:3], dtype=accumulation_dtype(q.dtype))
    return q.new_empty(batch, queries, heads, v.shape[-1]).transpose(1, 2), lse


@attention_slice_backward.register_fake
def _(d_out, q, out, lse, handle, q_segments, k_segments, bias, dropout_keys, kv_heads, value_dim, *options):
    batch, _, tokens, dim = q.shape
    dk = q.new_empty(batch, tokens, kv_heads, dim).transpose(1, 2)
    dv = q.new_empty(batch, tokens, kv_heads, value_dim).transpose(1, 2)
    d_bias = q.new_empty(0) if bias is None else torch.empty_like(bias, memory_format=torch.contiguous_format)
    return _empty_like_tokens(q), dk, dv, d_bias


def _setup_slice(ctx, inputs, output) -> None:
    q, k, v, handle, q_segments, k_segments, bias, dropout_keys, *options = inputs
    out, lse = output
    ctx.save_for_backward(q, out, lse, handle, q_segments, k_segments, bias, dropout_keys)  # keys and values are there
    ctx.sizes, ctx.options = (k.shape[1], v.shape[-1]), options
    ctx.mark_non_differentiable(lse)


def _slice_backward(ctx, d_out, d_lse):
    grads = torch.ops.phalanx.attention_slice_backward(d_out, *ctx.saved_tensors, *ctx.sizes, *ctx.options)
    dq, dk, dv, d_bias = grads
    return dq, dk, dv, None, None, None, d_bias if ctx.needs_input_grad[6] else None, None, *[None] * len(ctx.options)


attention_slice.register_autograd(_slice_backward, setup_context=_setup_slice)
