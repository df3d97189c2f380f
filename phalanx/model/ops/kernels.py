"""What a call of the attention operator asks for, and the fused kernels that PyTorch ships, for what they can do.

Which one is taken is decided in `choice.py`; `chunked.py` and `tiled.py` do what these cannot.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

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
    """PyTorch's CPU flash attention. It has no grouped heads, so keys and values are repeated."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, spec: Attention) -> tuple[Tensor, Tensor]:
        k, v = _repeat_heads(k, q), _repeat_heads(v, q)
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, spec.causal, scale=spec.scale)

    def backward(self, d_out, q, k, v, out, lse, spec) -> Gradients:
        wide_k, wide_v = _repeat_heads(k, q), _repeat_heads(v, q)
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
