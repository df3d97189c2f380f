"""The gate through which a model's outputs leave and their gradients come back: where a loss is computed outside.

In a graph it is the loss: an operator of an output, whose gradient is whatever came back for that output. Outputs go
into an *outbox* and gradients come from there; rows say which samples these are. While no outbox is open, the operator
is half the sum of squares, whose gradient is the output itself: so a model that ends in it can be proven, and tried for
samples that depend on each other, like any other. Where tensor parallelism splits an output (a vocabulary), every rank
puts its part into an output of zeros: the sum over the ranks is the output.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from phalanx.model.ops.own import own_op

ROWS = "output_rows"  # the input that says which row of the outputs each sample is


class Outbox:
    """The outputs of `num_rows` samples, and their gradients once they are known."""

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self.outputs: dict[int, Tensor] = {}
        self.split: set[int] = set()  # of the outputs, those of which other ranks have the other parts
        self.gradients: Sequence[Tensor] = ()

    def put(self, output: Tensor, rows: Tensor, number: int, dim: int, begin: int, size: int) -> None:
        if number not in self.outputs:
            shape = [self._num_rows, *output.shape[1:]]
            shape[dim] = size or shape[dim]
            self.outputs[number] = output.new_zeros(shape)
        if size:
            self.split.add(number)
        _part(self.outputs[number], output, dim, begin, size).index_copy_(0, rows, output)

    def take(self, output: Tensor, rows: Tensor, number: int, dim: int, begin: int, size: int) -> Tensor:
        """Zeros while functions are only warmed up."""
        if not self.gradients:
            return torch.zeros_like(output)
        return _part(self.gradients[number], output, dim, begin, size).index_select(0, rows)


def _part(whole: Tensor, output: Tensor, dim: int, begin: int, size: int) -> Tensor:
    return whole.narrow(dim, begin, output.shape[dim]) if size else whole


_open: Outbox | None = None


@contextmanager
def outbox(box: Outbox) -> Iterator[Outbox]:
    """Within it outputs of whatever runs in this process go there."""
    global _open
    before, _open = _open, box
    try:
        yield box
    finally:
        _open = before


# Of an output that is split, `begin` says where this rank's part begins along `dim`, which is `size` long in all.
_PART = "int dim=0, int begin=0, int size=0"


@own_op("leave", f"(Tensor output, Tensor rows, int number, {_PART}) -> Tensor")
def _leave(output: Tensor, rows: Tensor, number: int, dim: int = 0, begin: int = 0, size: int = 0) -> Tensor:
    if _open is not None:
        _open.put(output, rows, number, dim, begin, size)
        return output.new_zeros((), dtype=_wide(output))
    return output.to(_wide(output)).square().sum() / 2


@own_op("come_back", f"(Tensor d_loss, Tensor output, Tensor rows, int number, {_PART}) -> Tensor")
def _come_back(
    d_loss: Tensor, output: Tensor, rows: Tensor, number: int, dim: int = 0, begin: int = 0, size: int = 0
) -> Tensor:
    gradient = output if _open is None else _open.take(output, rows, number, dim, begin, size)
    return (gradient.to(_wide(output)) * d_loss).to(output.dtype)


@_leave.register_fake
def _(output, rows, number, dim=0, begin=0, size=0):
    return output.new_empty((), dtype=_wide(output))


@_come_back.register_fake
def _(d_loss, output, rows, number, dim=0, begin=0, size=0):
    return torch.empty_like(output)


def _setup_context(ctx, inputs, output) -> None:
    given, rows, *ctx.which = inputs
    ctx.save_for_backward(given, rows)


def _backward(ctx, d_loss):
    return torch.ops.phalanx.come_back(d_loss, *ctx.saved_tensors, *ctx.which), *(None,) * 5


_leave.register_autograd(_backward, setup_context=_setup_context)


def leave(output: Tensor, rows: Tensor, number: int) -> Tensor:
    return torch.ops.phalanx.leave(output, rows, number)


def _wide(output: Tensor) -> torch.dtype:
    return torch.float64 if output.dtype == torch.float64 else torch.float32
