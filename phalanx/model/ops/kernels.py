"""What a call of the attention operator asks for, and the kernels that PyTorch itself can do it with.

The fused kernels that it ships, for what they can do; and plain PyTorch, a block of queries at a time: every kind of
attention, on any device, and what all other kernels are compared with. Which one is taken is decided in `choice.py`;
`tiled.py` has our own for GPUs.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from phalanx.model.ops import random

Gradients = tuple[Tensor, Tensor, Tensor, "Tensor | None"]


@dataclass(frozen=True)
class Attention:
    """Everything but the tensors q, k, v: what may attend to what, and how scores become probabilities."""

    q_segments: Tensor | None
    k_segments: Tensor | None
    bias: Tensor | None
    dropout_keys: Tensor | None
    causal: bool
    scale: float
    window: int  # 0: none; else a query sees itself and the window - 1 keys before it
    softcap: float  # 0: none
    dropout: float
    first_head: int = 0  # which of the model's heads q's first one is: what is dropped depends on it
    first_query: Tensor | None = None  # and which of the micro-batch's tokens its first query is, on the host; None: 0

    @property
    def only_windowed(self) -> bool:
        """Nothing beyond causal or full attention and perhaps a sliding window."""
        return self.k_segments is None and self.bias is None and not (self.softcap or self.dropout)

    @property
    def plain(self) -> bool:
        """Nothing but causal or full attention: what every fused kernel can do."""
        return self.only_windowed and not self.window

    def among(self, num_keys: int) -> Attention:
        """The same for this many keys: a window back that holds them all is none."""
        return replace(self, window=0) if self.causal and self.window >= num_keys else self


class Kernel(Protocol):
    """Forward and backward of attention on one kind of device."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, spec: Attention) -> tuple[Tensor, Tensor]: ...

    def backward(
        self, d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, spec: Attention
    ) -> Gradients: ...


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


class FusedCpu:
    """PyTorch's CPU flash attention."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, spec: Attention) -> tuple[Tensor, Tensor]:
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, spec.causal, scale=spec.scale)

    def backward(self, d_out, q, k, v, out, lse, spec) -> Gradients:
        # In half precision it rounds what each head of a group adds to the gradients of keys and values.
        grouped = q.dtype in (torch.float32, torch.float64)
        wide_k, wide_v = (k, v) if grouped else (_repeat_heads(k, q), _repeat_heads(v, q))
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            d_out, q, wide_k, wide_v, out, lse, 0.0, spec.causal, scale=spec.scale
        )
        return dq, _sum_heads(dk, k), _sum_heads(dv, v), None


class CuDnn:
    """cuDNN's fused attention: the fastest on Hopper and later for plain causal or full attention."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, spec: Attention) -> tuple[Tensor, Tensor]:
        q, k, v = map(_with_dense_heads, (q, k, v))
        out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, spec.causal, False, scale=spec.scale
        )
        return out, lse.reshape(q.shape[:3])

    def backward(self, d_out, q, k, v, out, lse, spec) -> Gradients:
        d_out, q, k, v = map(_with_dense_heads, (d_out, q, k, v))
        seed = torch.zeros((), dtype=torch.int64, device=q.device)  # read only when dropout is on, which it is not
        dq, dk, dv = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            d_out, q, k, v, out, lse[..., None], seed, seed, None, None, None, q.shape[2], k.shape[2],
            0.0, spec.causal, scale=spec.scale,
        )  # fmt: skip
        return dq, dk, dv, None


class Flash:
    """Flash attention: plain, or causal with a sliding window. Its tensors are [batch, tokens, heads, dim]."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, spec: Attention) -> tuple[Tensor, Tensor]:
        q, k, v = (_with_dense_heads(x).transpose(1, 2) for x in (q, k, v))
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q, k, v, None, None, q.shape[1], k.shape[1], 0.0, spec.causal, False, scale=spec.scale, **_window(spec)
        )
        return out.transpose(1, 2), lse

    def backward(self, d_out, q, k, v, out, lse, spec) -> Gradients:
        d_out, q, k, v, out = (_with_dense_heads(x).transpose(1, 2) for x in (d_out, q, k, v, out))
        state = torch.empty(2, dtype=torch.uint64, device=q.device)  # read only when dropout is on, which it is not
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            d_out, q, k, v, out, lse, None, None, q.shape[1], k.shape[1], 0.0, spec.causal,
            state, state.new_empty(0), scale=spec.scale, **_window(spec),
        )  # fmt: skip
        return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2), None


def _with_dense_heads(x: Tensor) -> Tensor:
    """As the GPU's fused kernels want it: the numbers of a head side by side."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _window(spec: Attention) -> dict[str, int]:
    return {"window_size_left": spec.window - 1, "window_size_right": 0} if spec.window else {}


def _repeat_heads(x: Tensor, q: Tensor) -> Tensor:
    return x if x.shape[1] == q.shape[1] else x.repeat_interleave(q.shape[1] // x.shape[1], dim=1)


def _sum_heads(grad: Tensor, like: Tensor) -> Tensor:
    if grad.shape[1] == like.shape[1]:
        return grad
    # One by one: a sum over a short dim that is not the last is five times as slow on a CPU.
    return functools.reduce(torch.add, grad.unflatten(1, (like.shape[1], -1)).unbind(2))


_CHUNK_ELEMENTS = 1 << 24  # scores held at once by the chunked kernel: 64 MiB in float32


class Chunked:
    """Plain PyTorch, one block of queries at a time: segments, windows, soft caps, biases and keyed
    dropout, anywhere."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, spec: Attention) -> tuple[Tensor, Tensor]:
        wide = accumulation_dtype(q.dtype)
        keys, values = k.to(wide), v.to(wide)
        outs, lses = [], []
        for chunk in _chunks(q, k):
            probabilities, lse, _ = _probabilities(q, keys, spec, chunk)
            outs.append(_grouped(_drop(probabilities, spec, chunk), values, q.shape[1]))
            lses.append(lse)
        return torch.cat(outs, dim=2).to(q.dtype), torch.cat(lses, dim=2)

    def backward(self, d_out, q, k, v, out, lse, spec) -> Gradients:
        wide = accumulation_dtype(q.dtype)
        keys, values = k.to(wide), v.to(wide)
        dk, dv = torch.zeros_like(k, dtype=wide), torch.zeros_like(v, dtype=wide)
        d_bias = None if spec.bias is None else torch.zeros_like(spec.bias, dtype=wide)
        dqs = []
        for chunk in _chunks(q, k):
            probabilities, _, slope = _probabilities(q, keys, spec, chunk, lse[:, :, chunk])
            d_part, out_part = d_out[:, :, chunk].to(wide), out[:, :, chunk].to(wide)
            dropped = _drop(probabilities, spec, chunk)
            dv += _grouped_transposed(dropped, d_part, v.shape[1])
            d_prob = _drop(_grouped(d_part, values.transpose(-1, -2), q.shape[1]), spec, chunk)
            d_score = probabilities * (d_prob - (d_part * out_part).sum(-1, keepdim=True))
            if d_bias is not None:
                part = d_bias if d_bias.shape[2] == 1 else d_bias[:, :, chunk]
                part += d_score.sum_to_size(part.shape)
            if slope is not None:
                d_score = d_score * slope
            dqs.append(_grouped(d_score, keys, q.shape[1]) * spec.scale)
            dk += _grouped_transposed(d_score, q[:, :, chunk].to(wide), k.shape[1]) * spec.scale
        d_bias = None if d_bias is None or spec.bias is None else d_bias.to(spec.bias.dtype)
        return torch.cat(dqs, dim=2).to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), d_bias


def _chunks(q: Tensor, k: Tensor) -> list[slice]:
    size = max(1, _CHUNK_ELEMENTS // max(1, q.shape[0] * q.shape[1] * k.shape[2]))
    return [slice(start, min(start + size, q.shape[2])) for start in range(0, q.shape[2], size)]


def _probabilities(
    q: Tensor, k: Tensor, spec: Attention, chunk: slice, lse: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(softmax probabilities, log-sum-exp, slope of the soft cap) of one block of queries, in the keys' precision; rows
    with no key give zeros."""
    scores = _grouped(q[:, :, chunk].to(k.dtype), k.transpose(-1, -2), q.shape[1]) * spec.scale
    slope = None
    if spec.softcap:
        bent = torch.tanh(scores / spec.softcap)
        scores, slope = bent * spec.softcap, 1 - bent * bent
    if spec.bias is not None:
        scores = scores + (spec.bias if spec.bias.shape[2] == 1 else spec.bias[:, :, chunk])
    allowed = _allowed(q, k, spec, chunk)
    if allowed is not None:
        scores = scores.masked_fill(~allowed, float("-inf"))
    if lse is None:
        lse = torch.logsumexp(scores, dim=-1)
    finite = torch.where(lse == float("-inf"), 0.0, lse)
    return torch.exp(scores - finite[..., None]), lse, slope


def _allowed(q: Tensor, k: Tensor, spec: Attention, chunk: slice) -> Tensor | None:
    """Which keys each query of the block may see, broadcastable to [batch, heads, queries, keys]; None: all of them."""
    query = torch.arange(chunk.start, chunk.stop, device=q.device)[:, None] + (k.shape[2] - q.shape[2])
    key = torch.arange(k.shape[2], device=q.device)[None, :]
    rules: list[Tensor] = []
    if spec.causal:
        rules.append(key <= query)
    if spec.window:
        rules.append(key > query - spec.window)
        if not spec.causal:
            rules.append(key < query + spec.window)
    if spec.k_segments is not None:
        keys = spec.k_segments[:, None, None, :]
        rules.append(keys != 0)
        if spec.q_segments is not None:
            rules.append(keys == spec.q_segments[:, None, chunk, None])
    if not rules:
        return None
    allowed = rules[0]
    for rule in rules[1:]:
        allowed = allowed & rule
    return allowed


def _drop(probabilities: Tensor, spec: Attention, chunk: slice) -> Tensor:
    if not spec.dropout or spec.dropout_keys is None:
        return probabilities
    _, heads, _, num_keys = probabilities.shape
    device = probabilities.device
    own_heads = torch.arange(spec.first_head, spec.first_head + heads, device=device)
    first = 0 if spec.first_query is None else int(spec.first_query)
    queries = torch.arange(first + chunk.start, first + chunk.stop, device=device)
    keep = random.keep_attention(spec.dropout_keys, own_heads, queries, num_keys, spec.dropout)
    return torch.where(keep, probabilities * random.scale(spec.dropout), 0.0)


def _grouped(left: Tensor, right: Tensor, heads: int) -> Tensor:
    """left [batch, heads, rows, inner] @ right [batch, kv_heads, inner, columns] with heads sharing their group's
    right."""
    batch, _, rows, inner = left.shape
    kv_heads = right.shape[1]
    product = left.reshape(batch, kv_heads, (heads // kv_heads) * rows, inner) @ right
    return product.reshape(batch, heads, rows, right.shape[-1])


def _grouped_transposed(left: Tensor, right: Tensor, kv_heads: int) -> Tensor:
    """Σ over each group's heads of leftᵀ @ right: [batch, kv_heads, columns of left, columns of right]."""
    batch, _, _, columns = left.shape
    stacked = left.reshape(batch, kv_heads, -1, columns)
    return stacked.transpose(-1, -2) @ right.reshape(batch, kv_heads, -1, right.shape[-1])
