"""Phalanx's own graph operators besides attention: dropout by key, and the summed cross entropy.

Each is one node in a captured graph, so that costing, sharding and slicing see one thing to decide about; each
decomposes into plain aten operators when a segment is traced.
"""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx.model.ops import random

_library = torch.library.Library("phalanx", "FRAGMENT")
_library.define("dropout(Tensor x, Tensor keys, float p) -> Tensor")
_library.define("cross_entropy_sum(Tensor logits, Tensor targets, int ignore_index, float smoothing) -> Tensor")


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
        highest = wide.amax(dim=-1, keepdim=True)  # spelt out, so that a compiler can do it in one pass over the logits
        lse = highest + (wide - highest).exp().sum(dim=-1, keepdim=True).log()  # [rows, 1]
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
        classes = torch.arange(logits.shape[-1], device=logits.device)
        hit = (classes[None, :] == targets[:, None]).to(wide.dtype)
        if ctx.smoothing:
            hit = hit * (1 - ctx.smoothing) + ctx.smoothing / logits.shape[-1]
        scale = torch.where(targets != ctx.ignore_index, grad, 0.0)[:, None]
        return ((torch.exp(wide - lse) - hit) * scale).to(logits.dtype), None, None, None


def _cross_entropy_sum(logits: Tensor, targets: Tensor, ignore_index: int, smoothing: float) -> Tensor:
    if logits.device.type != "cpu":
        return _CrossEntropySum.apply(logits, targets, ignore_index, smoothing)
    # A CPU runs it operator by operator, and torch's own make the fewest passes over the logits.
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return torch.nn.functional.cross_entropy(
        wide, targets, ignore_index=ignore_index, label_smoothing=smoothing, reduction="sum"
    )


_library.impl("dropout", _dropout, "CompositeImplicitAutograd")
_library.impl("cross_entropy_sum", _cross_entropy_sum, "CompositeImplicitAutograd")
