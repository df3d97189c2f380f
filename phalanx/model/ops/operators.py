"""Phalanx's own graph operators besides attention: dropout by key and the summed cross entropy, whole and on a part of
what they work on, the embedding of a part of the vocabulary, and the grouped matrix product of mixtures of experts.

Each is one node in a graph, so that costing, sharding and slicing see one thing to decide about; all but the grouped
product decompose into plain aten operators when a segment is traced. Of that one both directions are operators of their
own, so that tracing never looks at how many rows an expert got: rows are sorted by expert, and `offsets` [groups] are
the ends of each expert's rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor
from torch.nn import functional

from phalanx.model.ops import cross_entropy, random
from phalanx.model.ops.own import own_op


@own_op("grouped_matmul", "(Tensor x, Tensor weight, Tensor offsets) -> Tensor")
def grouped_matmul(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """x [rows, inner] @ weight [groups, inner, columns], each row with its group's weight: [rows, columns]."""
    if _has_kernel(x, weight.shape[-1]):
        return torch._grouped_mm(x, weight, offs=offsets.to(torch.int32))
    out = x.new_zeros(x.shape[0], weight.shape[-1])
    for group, rows in _groups(offsets):
        out[rows] = x[rows] @ weight[group]
    return out


@own_op("grouped_matmul_weight", "(Tensor x, Tensor d_out, Tensor offsets) -> Tensor")
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


_AS_ON_GPU: ContextVar[bool] = ContextVar("as_on_gpu", default=False)


@contextmanager
def as_on_gpu() -> Iterator[None]:
    """Within it operators are traced in the form that they have on a GPU, wherever the tensors are."""
    token = _AS_ON_GPU.set(True)
    try:
        yield
    finally:
        _AS_ON_GPU.reset(token)


def is_as_on_gpu() -> bool:
    return _AS_ON_GPU.get()


def _fuses(x: Tensor) -> bool:
    """Whether a compiler will see the operator, or torch runs it step by step."""
    return x.device.type not in ("cpu", "meta") or is_as_on_gpu()  # what a CPU does is traced on the meta device


_LOOKS_ONLY: ContextVar[bool] = ContextVar("looks_only", default=False)


@contextmanager
def looks_only() -> Iterator[None]:
    """Within it nothing but the looks of results is of interest, so that what decides on contents is left out: by far
    most of the operators that a dropout is made of."""
    token = _LOOKS_ONLY.set(True)
    try:
        yield
    finally:
        _LOOKS_ONLY.reset(token)


def _dropout(x: Tensor, keys: Tensor, p: float) -> Tensor:
    return _dropout_part(x, keys, p, 0, 0)


def _dropout_part(
    x: Tensor, keys: Tensor, p: float, token_part: int, first_feature: int, first_token: Tensor | None = None
) -> Tensor:
    """x: a part of an activation; token_part: which of equally long parts of its tokens, counted from `first_token`."""
    if _LOOKS_ONLY.get():
        keep = torch.empty(x.shape, dtype=torch.bool, device=x.device)
    else:
        keep = random.keep_features(keys, x.shape, p, token_part, first_feature, first_token)
    return torch.where(keep, x * random.scale(p), 0.0)


def _embedding_part(weight: Tensor, ids: Tensor, first: int, padding_idx: int = -1) -> Tensor:
    """weight: the rows first, first + 1, … of a vocabulary; ids of other rows give zeros. The row `padding_idx` of the
    vocabulary gets no gradient, as in torch's own embedding."""
    rows = weight.shape[0]
    if not rows:  # depends on the weight, so that a part without rows has a backward too
        return weight.sum(dim=0).expand(*ids.shape, -1)
    place = ids - first
    # Rows that are not here are read all over the part: thousands of zeros added to one row would wait for each other.
    row = torch.remainder(place, rows)
    padding = padding_idx - first if first <= padding_idx < first + rows else -1
    return torch.where((row == place)[..., None], torch.embedding(weight, row, padding), 0.0)


def _cross_entropy_sum(logits: Tensor, targets: Tensor, ignore_index: int, smoothing: float) -> Tensor:
    if _fuses(logits):
        return cross_entropy.CrossEntropySum.apply(logits, targets, ignore_index, smoothing)
    # A CPU runs it operator by operator, and torch's own make the fewest passes over the logits.
    return functional.cross_entropy(
        cross_entropy.widened(logits), targets, ignore_index=ignore_index, label_smoothing=smoothing, reduction="sum"
    )


def _cross_entropy_part(logits: Tensor, targets: Tensor, first: int, ignore_index: int, smoothing: float) -> Tensor:
    return cross_entropy.part(logits, targets, first, ignore_index, smoothing, _fuses(logits))


_OPERATORS = {
    "dropout(Tensor x, Tensor keys, float p)": _dropout,
    "dropout_part(Tensor x, Tensor keys, float p, int token_part, int first_feature, Tensor? first_token=None)": (
        _dropout_part
    ),
    "embedding_part(Tensor weight, Tensor ids, int first, int padding_idx=-1)": _embedding_part,
    "cross_entropy_sum(Tensor logits, Tensor targets, int ignore_index, float smoothing)": _cross_entropy_sum,
    "cross_entropy_part(Tensor logits, Tensor targets, int first, int ignore_index, float smoothing)": (
        _cross_entropy_part
    ),
    "cross_entropy_join(Tensor parts, Tensor targets, int ignore_index, float smoothing, int classes)": (
        cross_entropy.join
    ),
}
_library = torch.library.Library("phalanx", "FRAGMENT")
for _signature, _function in _OPERATORS.items():
    _library.define(f"{_signature} -> Tensor")
    _library.impl(_signature.partition("(")[0], _function, "CompositeImplicitAutograd")
