"""How HuggingFace models are made to call our attention operator instead of building masks.

A model gets the mask that its own code would make, and with it, on the same tensor, what the mask says: causal, within
a window, inside chunks, padding. Where that tensor reaches our attention function as it was made, the operator does
what it says and the mask itself is never computed. A mask that a model changed or made by itself becomes a bias;
attention that a model computes by itself, or with more than our operator knows, is left to the model's own code. So
whatever a model does with its masks, it is given the real ones: only where nothing but our operator reads them, which
is tried first, are they never made.
"""

from __future__ import annotations

import contextlib
import contextvars
import inspect
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import transformers.masking_utils as masking_utils
from torch import Tensor, fx, nn
from torch.nn.modules import transformer
from transformers import AttentionInterface, AttentionMaskInterface

import phalanx.model.ops.attention  # noqa: F401  (defines the operator)
from phalanx.errors import CaptureError

NAME = "phalanx"
_documents: contextvars.ContextVar[Tensor | None] = contextvars.ContextVar("documents", default=None)
_own_positions: contextvars.ContextVar[bool] = contextvars.ContextVar("own_positions", default=False)


@contextlib.contextmanager
def documents(ids: Tensor | None, own_positions: bool = False) -> Iterator[None]:
    """Within, causal attention stays inside each document. ids: [batch, tokens], or None for one document per sample.
    own_positions: the model is given positions, from which transformers reads where documents begin."""
    tokens = _documents.set(ids), _own_positions.set(own_positions and ids is None)
    try:
        yield
    finally:
        _documents.reset(tokens[0])
        _own_positions.reset(tokens[1])


@dataclass(frozen=True)
class _Meaning:
    """What a mask says, in the words of our operator. segments: [batch, tokens], of queries and keys."""

    causal: bool = False
    window: int = 0
    q_segments: Tensor | None = None
    k_segments: Tensor | None = None


class _Unknown(Exception):
    """A mask that our operator has no words for."""


_unmade: contextvars.ContextVar[list[Tensor] | None] = contextvars.ContextVar("unmade", default=None)


@torch.library.custom_op("phalanx::unmade_mask", mutates_args=(), schema="(Tensor like, SymInt q, SymInt k) -> Tensor")
def _unmade_mask(like: Tensor, q: int, k: int) -> Tensor:
    raise AssertionError("a mask that nobody made was used")


@_unmade_mask.register_fake
def _(like: Tensor, q: int, k: int) -> Tensor:
    return like.new_empty(like.shape[0], 1, q, k)


@contextlib.contextmanager
def unmade_masks() -> Iterator[list[Tensor]]:
    """Within, masks whose meaning our operator has words for are not made: that takes a third of the time of reading a
    model, for nothing where attention alone reads them. What stands for them; `uses_unmade_mask` tells whether anything
    else reads it."""
    original = masking_utils.find_packed_sequence_indices
    # Positions that the model is not given are its own, and begin once in a sample.
    masking_utils.find_packed_sequence_indices = lambda ids: original(ids) if _own_positions.get() else None
    unmade: list[Tensor] = []
    token = _unmade.set(unmade)
    try:
        yield unmade
    finally:
        _unmade.reset(token)
        masking_utils.find_packed_sequence_indices = original


def uses_unmade_mask(graph: fx.Graph) -> bool:
    """Of a graph without dead code."""
    return any(node.target is torch.ops.phalanx.unmade_mask.default for node in graph.nodes)


def _mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """The model's own mask, [batch, 1, queries, keys], and what it says."""
    meaning, unmade = None, _unmade.get()
    with contextlib.suppress(_Unknown):
        meaning = _meaning(kwargs)
    if unmade is not None and not args and meaning is not None and meaning.causal:  # others may be None instead
        like = torch.empty(kwargs["batch_size"], dtype=kwargs.get("dtype", torch.float32), device=kwargs.get("device"))
        mask = torch.ops.phalanx.unmade_mask(like, kwargs["q_length"], kwargs["kv_length"])
        unmade.append(mask)
    else:
        mask = masking_utils.eager_mask(*args, **kwargs)
    if mask is not None and meaning is not None:
        mask._meaning = meaning  # pyright: ignore[reportAttributeAccessIssue]
    return mask


def _meaning(given: dict[str, Any]) -> _Meaning:
    found = _Meaning()
    if given.get("q_offset") or given.get("kv_offset"):
        raise _Unknown
    for name, values in _atoms(given.get("mask_function", masking_utils.causal_mask_function)):
        found = _combined(found, name, values, given)
    padding = given.get("attention_mask")
    if padding is None:
        return found
    real = padding.to(torch.int64)
    return replace(found, k_segments=real if found.k_segments is None else found.k_segments * real)


def _combined(found: _Meaning, name: str, values: dict[str, Any], given: dict[str, Any]) -> _Meaning:
    if name == "causal_mask_function":
        return replace(found, causal=True)
    if name == "bidirectional_mask_function":
        return found
    if name == "sliding_window_overlay":
        return replace(found, window=values["sliding_window"])
    if name == "sliding_window_bidirectional_overlay":
        return replace(found, window=values["sliding_window"] + 1)  # counted by inclusive distance
    if name == "packed_sequence_mask_function":
        return _in_segments(found, values["packed_sequence_mask"] + 1) if _own_positions.get() else found
    if name == "chunked_overlay":
        starts = values["left_padding"][:, None]
        positions = torch.arange(given["kv_length"], device=starts.device)[None]
        # Negative before a row's first token: moved up by as many chunks as any row can have, so that none is 0.
        return _in_segments(found, (positions - starts) // values["chunk_size"] + given["kv_length"] + 1)
    raise _Unknown


def _in_segments(found: _Meaning, ids: Tensor) -> _Meaning:
    if found.k_segments is not None:
        raise _Unknown
    return replace(found, q_segments=ids, k_segments=ids)


def _atoms(function: Callable[..., Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The masks that a mask is the intersection of: the function that made each, and what it was made with."""
    name = function.__qualname__.partition(".")[0]
    values = dict(inspect.getclosurevars(function).nonlocals)
    if function.__module__ != masking_utils.__name__:
        raise _Unknown
    if name == "and_masks":
        for part in values["mask_functions"]:
            yield from _atoms(part)
    else:
        yield name, values


# What attention functions are told besides that changes nothing: hints for kernels, or what a mask says already.
_NO_EFFECT = frozenset((
    "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "output_attentions", "position_ids",
    "deterministic", "is_causal", "sliding_window", "use_cache", "output_hidden_states", "output_router_logits",
))  # fmt: skip


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Any]:
    more = {name: given for name, given in kwargs.items() if given is not None and name not in _NO_EFFECT}
    if more or (attention_mask is not None and attention_mask.dim() != 4):
        more |= {"softcap": softcap, "position_bias": position_bias, "scaling": scaling, "dropout": dropout}
        return _by_own_code(module, query, key, value, attention_mask, more)
    meaning, bias = _read(module, attention_mask, query.dtype)
    if position_bias is not None:
        bias = position_bias if bias is None else bias + position_bias
    scale = float(query.shape[-1] ** -0.5 if scaling is None else scaling)
    return _operate(module, query, key, value, meaning, bias, scale, float(softcap or 0.0), float(dropout)), None


def _by_own_code(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: dict[str, Any]
) -> tuple[Tensor, Any]:
    """The attention function that stands beside the module's class, for what our operator has no words for."""
    options = {name: given for name, given in options.items() if given is not None}
    own: Any = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if own is None:
        raise CaptureError(
            f"{type(module).__name__} attends with options that are not known here: {', '.join(options)}",
            "this architecture cannot be captured",
        )
    _refuse_documents(module, "with code of its own")
    return own(module, query, key, value, mask, **options)


def _read(module: nn.Module, mask: Any, dtype: torch.dtype) -> tuple[_Meaning, Tensor | None]:
    """What a mask says; a mask that says nothing we know is a bias."""
    meaning = _Meaning() if mask is None else getattr(mask, "_meaning", None)
    if meaning is not None:
        return meaning, None
    assert mask is not None
    _refuse_documents(module, "with a mask of its own")
    if mask.dtype == torch.bool:
        mask = torch.where(mask, 0.0, torch.finfo(dtype).min)
    return _Meaning(), mask.to(dtype)


def _operate(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, meaning: _Meaning, bias: Tensor | None,
    scale: float, softcap: float, dropout: float,
) -> Tensor:  # fmt: skip
    """[batch, tokens, heads, dim]."""
    q_segments, k_segments = meaning.q_segments, meaning.k_segments
    ids = _documents.get()
    if ids is not None:
        if not meaning.causal:
            _refuse_documents(module, "in both directions")
        q_segments = k_segments = ids if k_segments is None else ids * k_segments
    out, _ = torch.ops.phalanx.attention(
        query, key, value, q_segments, k_segments, bias, None, meaning.causal, scale, meaning.window, softcap, dropout
    )
    return out.transpose(1, 2).contiguous()


def _refuse_documents(module: nn.Module, how: str) -> None:
    if _documents.get() is not None:
        raise CaptureError(
            f"{type(module).__name__} attends {how}, where documents cannot be kept apart", "leave documents out"
        )


AttentionInterface.register(NAME, _attend)
AttentionMaskInterface.register(NAME, _mask)


def _gpt_neo(self: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None):
    window = self.config.window_size if self.attention_type == "local" else 0
    return _own_method(self, query, key, value, attention_mask, 1.0, window)


def _gptj(self: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None):
    return _own_method(self, query, key, value, attention_mask, 1.0 / math.sqrt(self.head_dim), 0)


def _own_method(self: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scale: float, window: int):
    """These classes keep causality and windows to themselves; of the mask they need the padding."""
    meaning, bias = _read(self, mask, query.dtype)
    meaning = replace(meaning, causal=True, window=window)
    dropout = float(self.attn_dropout.p if self.training else 0.0)
    out = _operate(self, query, key, value, meaning, bias, scale, 0.0, dropout)
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
def means_of_class_probabilities() -> Iterator[None]:
    """Within, a cross entropy with class probabilities is the mean of those of its rows. Torch before 2.13 divides by a
    Python number of rows, which fixes the batch."""
    original = nn.functional.cross_entropy

    def cross_entropy(*args: Any, **kwargs: Any) -> Tensor:
        given = inspect.signature(original).bind(*args, **kwargs)
        given.apply_defaults()
        options = given.arguments
        averages = options["reduction"] == "mean" and options["size_average"] is options["reduce"] is None
        if not averages or not options["target"].is_floating_point() or options["input"].dim() < 2:
            return original(*args, **kwargs)
        return original(**{**options, "reduction": "none"}).mean()

    nn.functional.cross_entropy = cross_entropy
    try:
        yield
    finally:
        nn.functional.cross_entropy = original


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


@contextlib.contextmanager
def masks_are_not_looked_at() -> Iterator[None]:
    """torch's own Transformer looks at the values of a mask to find out whether it is causal, which no graph can; it
    then computes with the mask as it is, to the same result."""
    original = transformer._detect_is_causal_mask

    def detect(mask: Tensor | None, is_causal: bool | None = None, size: int | None = None) -> bool:
        return is_causal is True

    transformer._detect_is_causal_mask = detect
    try:
        yield
    finally:
        transformer._detect_is_causal_mask = original
