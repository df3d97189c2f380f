"""Which kernel does a call of the attention operator.

That depends only on shapes, dtypes, device and options, so that forward and backward of one call always agree.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from phalanx.model.ops.kernels import Attention, Chunked, CuDnn, Flash, FusedCpu, Kernel

# How far a fused kernel's results, of order one, may be from the chunked kernel's.
_TRUST = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}


class Kind(NamedTuple):
    """What a call asks of a kernel beyond its tensors. bias: how many of its rows there are, none, one or many."""

    causal: bool
    windowed: bool
    segments: bool
    of_queries: bool
    bias: int
    capped: bool
    dropped: bool

    @classmethod
    def of(cls, spec: Attention) -> Kind:
        return cls(
            spec.causal, spec.window > 0, spec.k_segments is not None, spec.q_segments is not None,
            0 if spec.bias is None else min(spec.bias.shape[2], 2), spec.softcap > 0, spec.dropout > 0,
        )  # fmt: skip

    def __str__(self) -> str:
        return "".join(f", {name}" for name, value in self._asdict().items() if value)

    def example(self, tokens: int, device: torch.device, dtype: torch.dtype, scale: float) -> Attention:
        """Attention of this kind among so many tokens of one sample with four heads."""
        ids = torch.arange(tokens, device=device)[None] // 13  # of which the first are padding
        generator = torch.Generator().manual_seed(1)
        bias = torch.randn(1, 4, tokens if self.bias > 1 else 1, tokens, generator=generator).to(device, dtype)
        return Attention(
            ids if self.of_queries else None, ids if self.segments else None, bias if self.bias else None,
            torch.tensor([7], device=device) if self.dropped else None, self.causal, scale, 17 * self.windowed,
            2.0 * self.capped, 0.25 * self.dropped,
        )  # fmt: skip


def choose(q: Tensor, k: Tensor, v: Tensor, spec: Attention) -> Kernel:
    """The fastest kernel that can do exactly this call."""
    for kernel in _candidates(q, k, v, spec):
        if _trusted(kernel, q.device, q.dtype, q.shape[-1], Kind.of(spec)):
            return kernel()
    return Chunked()


def _candidates(q: Tensor, k: Tensor, v: Tensor, spec: Attention) -> Iterator[type[Kernel]]:
    """Kernels whose limits allow this call, fastest first."""
    dim = q.shape[-1]
    simple = dim == v.shape[-1] and not (spec.causal and q.shape[2] != k.shape[2])
    if q.device.type == "cpu":
        if simple and spec.plain:
            yield FusedCpu
    elif q.device.type == "cuda":
        capability = torch.cuda.get_device_capability(q.device)
        if simple and q.dtype in (torch.bfloat16, torch.float16) and dim % 8 == 0 and dim <= 256:
            if spec.plain and dim <= 128 and k.shape[2] > 1 and capability >= (9, 0):
                yield CuDnn
            if spec.plain or (spec.causal and spec.only_windowed):
                yield Flash
        whole_rows = spec.bias is None or spec.bias.shape[3] == k.shape[2]
        tiled = _tiled() if whole_rows and capability >= (8, 0) else None
        if tiled and tiled.fits(max(dim, v.shape[-1]), q.dtype):
            yield tiled.Tiled


@functools.cache
def _tiled() -> Any:
    """The module with the kernel in Triton, where there is Triton."""
    return import_module("phalanx.model.ops.tiled") if find_spec("triton") else None


@functools.cache
def _trusted(kernel: type[Kernel], device: torch.device, dtype: torch.dtype, dim: int, kind: Kind) -> bool:
    """Fused kernels are private operators of PyTorch that change between versions and devices, and compilers err: each
    kind of call is compared with the chunked kernel once, on a small problem, before it is believed."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((1, 4, 80, dim), (1, 2, 80, dim), (1, 2, 80, dim), (1, 4, 80, dim))
    q, k, v, d_out = (torch.randn(s, generator=generator).to(device, dtype) for s in shapes)
    spec = kind.example(80, device, dtype, dim**-0.5)
    try:
        found, expected = (_both_ways(each, q, k, v, d_out, spec) for each in (kernel(), Chunked()))
        worst = max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # compilers raise errors of their own
        worst, reason = float("inf"), (str(error).splitlines() or [type(error).__name__])[0]
    else:
        reason = f"it is off by {worst:.1e}"
    if worst <= _TRUST[dtype]:
        return True
    what = f"{kernel.__name__} attention ({dtype}, head dim {dim}{kind})"
    warnings.warn(f"{what} cannot be used on {device}: {reason}; a slower kernel takes its place", stacklevel=2)
    return False


def _both_ways(kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, d_out: Tensor, spec: Attention) -> list[Tensor]:
    out, lse = kernel.forward(q, k, v, spec)
    gradients = kernel.backward(d_out, q, k, v, out, lse, spec)
    return [x.double() for x in (out, *gradients) if x is not None]  # the log-sum-exp shows in the gradients
