"""Attention in tiles, in Triton: everything that `Chunked` can do, on a GPU, with no score ever in memory.

Segments, windows, soft caps, biases with their gradients, keyed dropout, slices that begin in the middle. A tile of
queries passes over the tiles of keys that it may see and keeps a running softmax. On the way back one pass gives the
gradient of queries, one those of keys and values, one that of a bias: without atomics, so that results repeat to the
bit. The chunked kernel says what all this means; tests hold the two together.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from phalanx.model.ops import random, tiles
from phalanx.model.ops.kernels import Attention, Gradients

_tiles: Any = tiles


class Tiled:
    """Half precision, or float32 that is computed as such."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, spec: Attention) -> tuple[Tensor, Tensor]:
        batch, heads, queries, _ = q.shape
        out = q.new_empty(batch, queries, heads, v.shape[-1]).transpose(1, 2)
        lse = q.new_empty(batch, heads, queries, dtype=torch.float32)
        tensors, options = _arguments(q, k, v, spec)
        grid = (triton.cdiv(queries, options["ROWS"]), heads, batch)
        _tiles.forward[grid](*tensors, out, out.stride()[:3], lse, **options)
        return out, lse

    def backward(self, d_out, q, k, v, out, lse, spec) -> Gradients:
        batch, heads, queries, _ = q.shape
        tensors, options = _arguments(q, k, v, spec)
        query_tiles, key_tiles = triton.cdiv(queries, options["ROWS"]), triton.cdiv(k.shape[2], options["KEYS"])
        d_out, out, lse = _dense(d_out), _dense(out), lse.contiguous()
        delta = torch.empty_like(lse)
        given = (d_out, d_out.stride()[:3], lse, delta)
        dq, dk, dv = (_token_major_like(x) for x in (q, k, v))
        _tiles.query_gradient[query_tiles, heads, batch](
            *tensors, *given, out, out.stride()[:3], dq, dq.stride()[:3], **options
        )
        _tiles.key_gradients[key_tiles, k.shape[1], batch](
            *tensors, *given, dk, dk.stride()[:3], dv, dv.stride()[:3], **options
        )
        if spec.bias is None:
            return dq, dk, dv, None
        samples, own_heads, rows, _ = spec.bias.shape
        d_bias = torch.empty_like(spec.bias, memory_format=torch.contiguous_format)
        _tiles.bias_gradient[key_tiles * (query_tiles if rows > 1 else 1), own_heads, samples](
            *tensors, *given, d_bias, d_bias.stride(), (batch // samples, heads // own_heads), EACH_ROW=rows > 1,
            **options,
        )  # fmt: skip
        return dq, dk, dv, d_bias


def _arguments(q: Tensor, k: Tensor, v: Tensor, spec: Attention) -> tuple[list[Any], dict[str, Any]]:
    """What every kernel takes: tensors with their strides and numbers; and what it is compiled for."""
    q, k, v = _dense(q), _dense(k), _dense(v)
    bias = None if spec.bias is None else spec.bias.expand(*q.shape[:3], k.shape[2])
    dropout_keys = _whole(spec.dropout_keys) if spec.dropout else None
    first_query = 0 if spec.first_query is None else int(spec.first_query)
    tensors = [
        q, q.stride()[:3], k, k.stride()[:3], v, v.stride()[:3], _whole(spec.q_segments), _whole(spec.k_segments),
        bias, None if bias is None else bias.stride(), dropout_keys,
        q.shape[1] // k.shape[1], q.shape[2], k.shape[2], q.shape[1], spec.scale, spec.softcap, spec.window,
        random.threshold(spec.dropout), random.scale(spec.dropout), spec.first_head, first_query,
    ]  # fmt: skip
    dim, value_dim = q.shape[-1], v.shape[-1]
    kinds = {
        "DIM": dim, "WIDTH": _width(dim), "VALUE_DIM": value_dim, "VALUE_WIDTH": _width(value_dim),
        "CAUSAL": spec.causal, "WINDOWED": spec.window > 0, "CAPPED": spec.softcap > 0,
    }  # fmt: skip
    return tensors, kinds | _tile(max(dim, value_dim), q.dtype)


def fits(dim: int, dtype: torch.dtype) -> bool:
    """Whether tiles of heads so wide stay in registers: where they don't, it is tens of times as slow."""
    return dim <= (128 if dtype == torch.float32 else 256) and dtype in (torch.float32, torch.bfloat16, torch.float16)


def _tile(dim: int, dtype: torch.dtype) -> dict[str, int]:
    """How many queries and keys at a time, and by how many threads. Half precision multiplies in tensor cores."""
    if dtype == torch.float32:
        rows, keys, stages = (32, 32, 2) if dim <= 64 else (16, 32, 1)
    else:
        rows, keys, stages = (64, 64, 2) if dim <= 128 else (64, 32, 1)
    return {"ROWS": rows, "KEYS": keys, "num_warps": 4, "num_stages": stages}


def _width(dim: int) -> int:
    """Products of tiles want powers of two, and 16 at least."""
    return max(16, triton.next_power_of_2(dim))


def _dense(x: Tensor) -> Tensor:
    """With the numbers of a head side by side."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _whole(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def _token_major_like(x: Tensor) -> Tensor:
    batch, heads, tokens, dim = x.shape
    return x.new_empty(batch, tokens, heads, dim).transpose(1, 2)
