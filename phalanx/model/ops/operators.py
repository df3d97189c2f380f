"""Phalanx's own graph operators besides attention: dropout by key, and the summed cross entropy.

Each is one node in a captured graph, so that costing, sharding and slicing see one thing to decide about; each
decomposes into plain aten operators when a segment is traced.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from phalanx.model.ops import random

_library = torch.library.Library("phalanx", "FRAGMENT")
_library.define("dropout(Tensor x, Tensor keys, float p) -> Tensor")
_library.define("cross_entropy_sum(Tensor logits, Tensor targets, int ignore_index, float smoothing) -> Tensor")

_AS_ON_GPU: ContextVar[bool] = ContextVar("as_on_gpu", default=False)


@contextmanager
def as_on_gpu() -> Iterator[None]:
    """Within it operators are traced in the form that they have on a GPU, wherever the tensors are."""
    token = _AS_ON_GPU.set(True)
    try:
        yield
    finally:
        _AS_ON_GPU.reset(token)


def _dropout(x: Tensor, keys: Tensor, p: float) -> Tensor:
    keep = random.keep_features(keys, x.shape, p)
    return torch.where(keep, x * random.scale(p), 0.0)


class _CrossEntropySum(torch.autograd.Function):
    """Σ over rows of −log softmax(logits)[target], with a gradient that is one pointwise pass over the logits.

    Only the logits and their log-sum-exp are kept: neither probabilities nor a float32 copy is ever stored.
    """

    @staticmethod
    def forward(ctx, logits: Tensor, targets: Tensor, ignore_index: int, smoothing: float) -> Tensor:
        wide = logits if logits.dtype == torch.float64 else logits.float()
        lse = _log_sum_exp(wide)
        valid = targets != ignore_index
        safe = torch.where(valid, targets, 0)
        loss = (lse - wide.gather(-1, safe[:, None])).squeeze(-1)
        if smoothing:
            uniform = lse.squeeze(-1) - wide.mean(dim=-1)
            loss = (1 - smoothing) * loss + smoothing * uniform
        ctx.save_for_backward(logits, targets, lse)
        ctx.ignore_index, ctx.smoothing = ignore_index, smoothing
        return torch.where(valid, loss, 0.0).sum()

    @staticmethod
    def backward(ctx, grad: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        logits, targets, lse = ctx.saved_tensors
        wide = logits if logits.dtype == torch.float64 else logits.float()
        valid = targets != ctx.ignore_index
        at_target = torch.where(valid, targets, 0)[:, None]
        scale = torch.where(valid, grad, 0.0)[:, None]
        other = ctx.smoothing / logits.shape[-1]  # what a class that is not the target should have
        d_logits = (torch.exp(wide - lse) - other) * scale
        # Targets are written afterwards: comparing each logit's class with its row's target costs more than the rest.
        d_target = (torch.exp(wide.gather(-1, at_target) - lse) - (1 - ctx.smoothing + other)) * scale
        return d_logits.to(logits.dtype).scatter(-1, at_target, d_target.to(logits.dtype)), None, None, None


def _log_sum_exp(x: Tensor) -> Tensor:
    """log Σ exp over each row [rows, 1], by parts that a compiler can hold in registers: one pass over x, and one
    exponential for each of its elements."""
    rows, classes = x.shape
    part = _part(classes)
    parts = x.reshape(rows, classes // part, part)
    highest = parts.amax(dim=-1, keepdim=True)
    finite = torch.where(highest == float("-inf"), 0.0, highest)  # a part may be masked as a whole
    sums = (parts - finite).exp().sum(dim=-1)  # [rows, parts]
    highest = highest.squeeze(-1)
    top = highest.amax(dim=-1, keepdim=True)
    return top + ((highest - top).exp() * sums).sum(dim=-1, keepdim=True).log()


def _part(classes: int) -> int:
    """The largest even part of at most 1024 classes that memory is read well in; where there is none, all of them."""
    return max((size for size in range(64, 1025, 64) if classes % size == 0), default=classes)


def _cross_entropy_sum(logits: Tensor, targets: Tensor, ignore_index: int, smoothing: float) -> Tensor:
    if logits.device.type != "cpu" or _AS_ON_GPU.get():
        return _CrossEntropySum.apply(logits, targets, ignore_index, smoothing)
    # A CPU runs it operator by operator, and torch's own make the fewest passes over the logits.
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return torch.nn.functional.cross_entropy(
        wide, targets, ignore_index=ignore_index, label_smoothing=smoothing, reduction="sum"
    )


_library.impl("dropout", _dropout, "CompositeImplicitAutograd")
_library.impl("cross_entropy_sum", _cross_entropy_sum, "CompositeImplicitAutograd")
