"""Dropout decisions as a pure function of the logical element.

Whether an element is kept depends on (seed, sample's place in the data stream, place in the model, token, feature) or,
for attention, (…, head, query, key) — never on how the work is split, in which order it runs, or how often it is
recomputed. Keys travel as tensors, so that no compiled function is specialised on them.

All hashes are 32-bit values in int64 lanes: products may wrap, the mask keeps their exact low half on every device.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_RANGE = 1 << 32


def mix(x: Tensor) -> Tensor:
    """A bijective avalanche of 32-bit integers ("lowbias32")."""
    x = (x ^ (x >> 16)) * 0x7FEB352D & _MASK
    x = (x ^ (x >> 15)) * 0x846CA68B & _MASK
    return x ^ (x >> 16)


def combine(key: Tensor, index: Tensor) -> Tensor:
    """A new key from a key and an index, broadcasting."""
    return mix(key ^ mix(index ^ 0x1E3779B9))


def site_hash(site: str) -> int:
    """The 32-bit name of a place in the model ('transformer.h.3.mlp.dropout#0')."""
    return int.from_bytes(hashlib.blake2b(site.encode(), digest_size=4).digest(), "little")


def sample_keys(seed: int, first: int, count: int, device: torch.device | str = "cpu") -> Tensor:
    """Keys of the samples at stream positions [first, first + count): [count]."""
    position = torch.arange(first, first + count, dtype=torch.int64, device=device)
    key = torch.full_like(position, site_hash(f"seed {seed}"))
    return combine(combine(key, position & _MASK), position >> 32)


def site_keys(samples: Tensor, sites: Tensor) -> Tensor:
    """Keys of every (site, sample): [sites, samples]."""
    return combine(samples[None, :], sites[:, None])


def threshold(p: float) -> int:
    return min(round(p * _RANGE), _RANGE - 1)


def scale(p: float) -> float:
    """What survivors are multiplied by. With p = 1 nothing survives."""
    return 1.0 / (1.0 - p) if p < 1 else 0.0


def keep_features(
    keys: Tensor,
    shape: torch.Size | tuple[int, ...],
    p: float,
    token_part: int = 0,
    first_feature: int = 0,
    first_token: Tensor | None = None,
) -> Tensor:
    """Which elements of an activation survive; bool, of the given shape.

    keys: [samples]. The leading dims of `shape` hold samples × tokens, together or apart; the last dim is the feature.
    token_part, first_feature: where these tokens and features lie in the whole, tokens in parts as long as this one,
    of which the first begins at `first_token`.
    """
    samples, features = keys.shape[0], shape[-1]
    rows = 1
    for size in shape[:-1]:
        rows *= size
    num_tokens = rows // samples
    tokens = torch.arange(token_part * num_tokens, (token_part + 1) * num_tokens, device=keys.device)
    tokens = tokens if first_token is None else tokens + first_token
    token_keys = combine(keys[:, None], tokens[None, :]).reshape(*shape[:-1], 1)
    feature = torch.arange(first_feature, first_feature + features, device=keys.device)
    return combine(token_keys, feature) >= threshold(p)


def keep_attention(keys: Tensor, heads: Tensor, queries: Tensor, num_keys: int, p: float) -> Tensor:
    """Which attention probabilities survive; bool [samples, heads, queries, keys].

    keys: [samples]; heads and queries: their absolute indices, so that any part can be computed anywhere.
    """
    row = combine(combine(keys[:, None], heads[None, :])[:, :, None], queries)
    return combine(row[..., None], torch.arange(num_keys, device=keys.device)) >= threshold(p)
