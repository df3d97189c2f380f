"""The grouped matrix product of mixtures of experts: `phalanx::grouped_matmul` and the gradient of its weights.

Rows are sorted by expert; `offsets` [groups] are the ends of each expert's rows. Both directions are operators of their
own, so that tracing never looks at how many rows an expert got.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor


@torch.library.custom_op(
    "phalanx::grouped_matmul", mutates_args=(), schema="(Tensor x, Tensor weight, Tensor offsets) -> Tensor"
)
def grouped_matmul(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """x [rows, inner] @ weight [groups, inner, columns], each row with its group's weight: [rows, columns]."""
    if _has_kernel(x, weight.shape[-1]):
        return torch._grouped_mm(x, weight, offs=offsets.to(torch.int32))
    out = x.new_zeros(x.shape[0], weight.shape[-1])
    for group, rows in _groups(offsets):
        out[rows] = x[rows] @ weight[group]
    return out


@torch.library.custom_op(
    "phalanx::grouped_matmul_weight", mutates_args=(), schema="(Tensor x, Tensor d_out, Tensor offsets) -> Tensor"
)
def grouped_matmul_weight(x: Tensor, d_out: Tensor, offsets: Tensor) -> Tensor:
    """xᵀ @ d_out of each group's rows: [groups, inner, columns]."""
    if _has_kernel(x, d_out.shape[-1]):
        return torch._grouped_mm(x.t(), d_out, offs=offsets.to(torch.int32))
    out = x.new_zeros(offsets.shape[0], x.shape[-1], d_out.shape[-1])
    for group, rows in _groups(offsets):
        out[group] = x[rows].t() @ d_out[rows]
    return out


def _has_kernel(x: Tensor, columns: int) -> bool:
    """Its rows must begin at multiples of 16 bytes."""
    aligned = x.shape[-1] % 8 == 0 and columns % 8 == 0
    return x.device.type == "cuda" and x.dtype == torch.bfloat16 and aligned


def _groups(offsets: Tensor) -> Iterator[tuple[int, slice]]:
    start = 0
    for group, end in enumerate(offsets.tolist()):
        yield group, slice(start, int(end))
        start = int(end)


@grouped_matmul.register_fake
def _(x, weight, offsets):
    return x.new_empty(x.shape[0], weight.shape[-1])


@grouped_matmul_weight.register_fake
def _(x, d_out, offsets):
    return x.new_empty(offsets.shape[0], x.shape[-1], d_out.shape[-1])


def _setup_context(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx, d_out):
    x, weight, offsets = ctx.saved_tensors
    d_x = torch.ops.phalanx.grouped_matmul(d_out, weight.transpose(-1, -2), offsets)
    return d_x, torch.ops.phalanx.grouped_matmul_weight(x, d_out, offsets), None


grouped_matmul.register_autograd(_backward, setup_context=_setup_context)
