"""The arithmetic of the summed cross entropy: whole, and on logits whose classes are split over ranks.

Split logits are never gathered: each part gives two or three numbers per row, and the loss follows from those of all
parts. Every form reads the logits as few times as it can and keeps neither probabilities nor a float32 copy of them.
Which form a device gets is decided in `operators.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

_NOTHING = float("-inf")


class CrossEntropySum(torch.autograd.Function):
    """Σ over rows of −log softmax(logits)[target], with a gradient that is one pointwise pass over the logits.

    Only the logits and their log-sum-exp are kept: neither probabilities nor a float32 copy is ever stored.
    """

    @staticmethod
    def forward(ctx, logits: Tensor, targets: Tensor, ignore_index: int, smoothing: float) -> Tensor:
        wide = widened(logits)
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
        wide = widened(logits)
        valid = targets != ctx.ignore_index
        at_target = torch.where(valid, targets, 0)[:, None]
        scale = torch.where(valid, grad, 0.0)[:, None]
        other = ctx.smoothing / logits.shape[-1]  # what a class that is not the target should have
        d_logits = (torch.exp(wide - lse) - other) * scale
        # Targets are written afterwards: comparing each logit's class with its row's target costs more than the rest.
        d_target = (torch.exp(wide.gather(-1, at_target) - lse) - (1 - ctx.smoothing + other)) * scale
        return d_logits.to(logits.dtype).scatter(-1, at_target, d_target.to(logits.dtype)), None, None, None


class CrossEntropyPart(torch.autograd.Function):
    """What the loss must know of the classes first, first + 1, …: per row their log-sum-exp, the target's logit (0
    where the target is ignored or another part's) and, with smoothing, the sum of the logits.

    fuses: whether a compiler will fuse what is written here, or each operator makes a pass of its own.
    """

    @staticmethod
    def forward(
        ctx, logits: Tensor, targets: Tensor, first: int, ignore_index: int, smoothing: float, fuses: bool
    ) -> Tensor:
        wide = widened(logits)
        lse = _log_sum_exp(wide) if fuses else torch.logsumexp(wide, dim=-1, keepdim=True)
        at_target, here = _targets_here(targets, first, logits.shape[-1], ignore_index)
        statistics = [lse, torch.where(here, wide.gather(-1, at_target), 0.0)]
        if smoothing:
            statistics.append(wide.sum(dim=-1, keepdim=True))
        ctx.save_for_backward(logits, targets, lse)
        ctx.first, ctx.ignore_index = first, ignore_index
        return torch.cat(statistics, dim=-1)

    @staticmethod
    def backward(ctx, grad: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        logits, targets, lse = ctx.saved_tensors
        wide, finite = widened(logits), _finite(lse)
        at_target, here = _targets_here(targets, ctx.first, logits.shape[-1], ctx.ignore_index)
        d_lse, d_target, *d_sum = grad.split(1, dim=-1)

        def without_target(x: Tensor) -> Tensor:
            from_lse = torch.exp(x - finite) * d_lse
            return from_lse + d_sum[0] if d_sum else from_lse

        # Targets are written afterwards, as above; rows without one here get what they have already.
        d_at_target = without_target(wide.gather(-1, at_target)) + torch.where(here, d_target, 0.0)
        d_logits = without_target(wide).to(logits.dtype).scatter(-1, at_target, d_at_target.to(logits.dtype))
        return d_logits, None, None, None, None, None


def part(logits: Tensor, targets: Tensor, first: int, ignore_index: int, smoothing: float, fuses: bool) -> Tensor:
    """Statistics [rows, 2 or 3] of a part of the classes, which may be none of them."""
    if logits.shape[-1]:
        return CrossEntropyPart.apply(logits, targets, first, ignore_index, smoothing, fuses)
    zero = widened(logits).sum(dim=-1)  # depends on the logits, so that a part without classes has a backward too
    return torch.stack([zero + _NOTHING, *[zero] * (2 if smoothing else 1)], dim=-1)


def join(parts: Tensor, targets: Tensor, ignore_index: int, smoothing: float, classes: int) -> Tensor:
    """The summed loss from the statistics of all parts [parts, rows, 2 or 3]; classes: of all parts together."""
    of_parts, at_target, *sums = parts.unbind(-1)
    lse = torch.logsumexp(of_parts, dim=0)
    valid = targets != ignore_index
    loss = lse - at_target.sum(dim=0) - _zero_for_classes(torch.where(valid, targets, 0), classes, lse)
    if smoothing:
        loss = (1 - smoothing) * loss + smoothing * (lse - sums[0].sum(dim=0) / classes)
    return torch.where(valid, loss, 0.0).sum()


def _zero_for_classes(targets: Tensor, classes: int, like: Tensor) -> Tensor:
    """Zeros that must be read at each row's target: a label that is no class at all fails here, since to each part it
    looks like another part's. They are one number in memory."""
    zeros = like.new_zeros(1, 1).expand(targets.shape[0], classes)
    return zeros.gather(-1, targets[:, None]).squeeze(-1)


def _targets_here(targets: Tensor, first: int, classes: int, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Where to read each row's target, always a class of this part, and whether that is the target; both [rows, 1]."""
    place = (targets - first)[:, None]
    here = (place >= 0) & (place < classes) & (targets != ignore_index)[:, None]
    return torch.where(here, place, 0), here


def widened(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def _finite(highest: Tensor) -> Tensor:
    """What may be subtracted from logits that are all masked, too."""
    return torch.where(highest == _NOTHING, 0.0, highest)


def _log_sum_exp(x: Tensor) -> Tensor:
    """log Σ exp over each row [rows, 1], by pieces that a compiler can hold in registers: one pass over x, and one
    exponential for each of its elements."""
    rows, classes = x.shape
    size = _piece(classes)
    pieces = x.reshape(rows, classes // size, size)
    highest = pieces.amax(dim=-1, keepdim=True)
    sums = (pieces - _finite(highest)).exp().sum(dim=-1)  # [rows, pieces]
    highest = highest.squeeze(-1)
    top = _finite(highest.amax(dim=-1, keepdim=True))
    return top + ((highest - top).exp() * sums).sum(dim=-1, keepdim=True).log()


def _piece(classes: int) -> int:
    """The largest even piece of at most 1024 classes that memory is read well in; where there is none, all of them."""
    return max((size for size in range(64, 1025, 64) if classes % size == 0), default=classes)
