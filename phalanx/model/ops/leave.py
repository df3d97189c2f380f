"""The gate through which a model's outputs leave and their gradients come back: where a loss is computed outside.

In a graph it is the loss: an operator of an output, whose gradient is whatever came back for that output. Outputs go
into an *outbox* and gradients come from there; rows say which samples these are. While no outbox is open, the operator
is half the sum of squares, whose gradient is the output itself: so a model that ends in it can be proven, and tried for
samples that depend on each other, like any other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

ROWS = "output_rows"  # the input that says which row of the outputs each sample is


class Outbox:
    """The outputs of `num_rows` samples, and their gradients once they are known."""

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self.outputs: dict[int, Tensor] = {}
        self.gradients: Sequence[Tensor] = ()

    def put(self, output: Tensor, rows: Tensor, number: int) -> None:
        if number not in self.outputs:
            self.outputs[number] = output.new_zeros(self._num_rows, *output.shape[1:])
        self.outputs[number].index_copy_(0, rows, output)

    def take(self, output: Tensor, rows: Tensor, number: int) -> Tensor:
        """Zeros while functions are only warmed up."""
        return self.gradients[number].index_select(0, rows) if self.gradients else torch.zeros_like(output)


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


@torch.library.custom_op("phalanx::leave", mutates_args=(), schema="(Tensor output, Tensor rows, int number) -> Tensor")
def _leave(output: Tensor, rows: Tensor, number: int) -> Tensor:
    if _open is not None:
        _open.put(output, rows, number)
        return output.new_zeros((), dtype=_wide(output))
    return output.to(_wide(output)).square().sum() / 2


@torch.library.custom_op(
    "phalanx::come_back", mutates_args=(), schema="(Tensor d_loss, Tensor output, Tensor rows, int number) -> Tensor"
)
def _come_back(d_loss: Tensor, output: Tensor, rows: Tensor, number: int) -> Tensor:
    gradient = output if _open is None else _open.take(output, rows, number)
    return (gradient.to(_wide(output)) * d_loss).to(output.dtype)


@_leave.register_fake
def _(output, rows, number):
    return output.new_empty((), dtype=_wide(output))


@_come_back.register_fake
def _(d_loss, output, rows, number):
    return torch.empty_like(output)


def _setup_context(ctx, inputs, output) -> None:
    given, rows, ctx.number = inputs
    ctx.save_for_backward(given, rows)


def _backward(ctx, d_loss):
    return torch.ops.phalanx.come_back(d_loss, *ctx.saved_tensors, ctx.number), None, None


_leave.register_autograd(_backward, setup_context=_setup_context)


def leave(output: Tensor, rows: Tensor, number: int) -> Tensor:
    return torch.ops.phalanx.leave(output, rows, number)


def _wide(output: Tensor) -> torch.dtype:
    return torch.float64 if output.dtype == torch.float64 else torch.float32
