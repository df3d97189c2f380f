"""How HuggingFace models are made to call our attention operator, and to build no masks.

The registered attention function serves every architecture that uses transformers' attention interface; the few that
carry their own attention method are patched while they are captured. Whether a model really went through here is not
assumed: capture counts the operator's nodes and compares with the unpatched model.
"""

from __future__ import annotations

import contextlib
import contextvars
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

import phalanx.model.ops.attention  # noqa: F401  (defines the operator)
from phalanx.errors import CaptureError

NAME = "phalanx"
_documents: contextvars.ContextVar[Tensor | None] = contextvars.ContextVar("documents", default=None)


@contextlib.contextmanager
def documents(ids: Tensor | None) -> Iterator[None]:
    """Within, causal attention stays inside each document.
    ids: [batch, tokens], or None for one document per sample."""
    token = _documents.set(ids)
    try:
        yield
    finally:
        _documents.reset(token)


def _padding_only(*args: Any, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor | None:
    """The mask a model is given: which keys are real, [batch, 1, 1, keys].
    Causality and windows stay in the operator."""
    return None if attention_mask is None else attention_mask[:, None, None, :]


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    window = int(sliding_window or 0)
    if window and not causal:
        window += 1  # transformers counts a bidirectional window by inclusive distance
    k_segments = None if attention_mask is None else attention_mask[:, 0, 0, :].to(torch.int64)
    q_segments = None
    ids = _documents.get()
    if ids is not None and not causal:
        raise CaptureError(
            f"{type(module).__name__} attends in both directions, where documents cannot be kept apart",
            "leave documents out",
        )
    if ids is not None:
        q_segments = k_segments = ids if k_segments is None else ids * k_segments
    out, _ = torch.ops.phalanx.attention(
        query, key, value, q_segments, k_segments, position_bias, None, causal,
        float(query.shape[-1] ** -0.5 if scaling is None else scaling), window, float(softcap or 0.0), float(dropout),
    )  # fmt: skip
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, _attend)
AttentionMaskInterface.register(NAME, _padding_only)


def _gpt_neo(self: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None):
    window = self.config.window_size if self.attention_type == "local" else None
    return _own_method(self, query, key, value, attention_mask, scaling=1.0, sliding_window=window)


def _gptj(self: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None):
    return _own_method(self, query, key, value, attention_mask, scaling=1.0 / math.sqrt(self.head_dim))


def _own_method(self: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any):
    dropout = self.attn_dropout.p if self.training else 0.0
    out, _ = _attend(self, query, key, value, attention_mask, dropout=dropout, is_causal=True, **options)
    return out.transpose(1, 2), None


OWN_ATTENTION: dict[str, Callable[..., Any]] = {"GPTNeoSelfAttention": _gpt_neo, "GPTJAttention": _gptj}


@contextlib.contextmanager
def own_attention_methods(model: nn.Module) -> Iterator[None]:
    """Within, the attention classes that ignore transformers' interface call our operator too."""
    patched = {type(module) for module in model.modules() if type(module).__name__ in OWN_ATTENTION}
    originals = {cls: vars(cls)["_attn"] for cls in patched}
    try:
        for cls in patched:
            setattr(cls, "_attn", OWN_ATTENTION[cls.__name__])  # noqa: B010  (not every module has one)
        yield
    finally:
        for cls, original in originals.items():
            setattr(cls, "_attn", original)  # noqa: B010


@contextlib.contextmanager
def experts_of_any_dtype() -> Iterator[None]:
    """Within, mixtures of experts use the grouped product that takes every dtype; capture then puts our
    operator there."""
    from transformers.integrations import moe

    original = moe._can_use_grouped_mm
    moe._can_use_grouped_mm = lambda *args: False
    try:
        yield
    finally:
        moe._can_use_grouped_mm = original


@contextlib.contextmanager
def no_checkpointing() -> Iterator[None]:
    """Within, torch's activation checkpointing computes what it is given and nothing else: what is recomputed is the
    plan's decision, and a reentrant checkpoint would hide its contents from a graph."""
    from torch.utils import checkpoint

    class Called:
        @staticmethod
        def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
            return function(*args)

    def once(*args: Any, **kwargs: Any) -> Iterator[None]:
        yield

    names = {"CheckpointFunction": Called, "_checkpoint_without_reentrant_generator": once}
    originals = {name: getattr(checkpoint, name) for name in names}
    for name, new in names.items():
        setattr(checkpoint, name, new)
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(checkpoint, name, original)
