"""What does the update of an element depend on: on itself, its tensor, or all tensors? A rank that holds a part of a
tensor may update that part in the first case only, one that holds some of the tensors in the first two.

Torch's own are known. Others are tried out: two small matrices are updated by one optimizer, and beside it by one each,
and in rows of elements by one each; whoever looks at norms, shapes, rows or columns gives other values.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

KNOWN = (
    torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD, torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.Adamax,
    torch.optim.NAdam, torch.optim.RAdam, torch.optim.RMSprop, torch.optim.Rprop, torch.optim.ASGD,
)  # fmt: skip
_SHAPES, _CUT, _STEPS = ((4, 6), (3, 5)), 7, 3
_TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}

Make = Callable[[list[Tensor]], torch.optim.Optimizer]
Reach = Literal["element", "tensor", "all"]


def reach_of(kind: type[torch.optim.Optimizer], make: Make, device: torch.device) -> Reach:
    """make: an optimizer of this kind for these tensors, with the arguments of the one that is asked about. One that
    cannot be tried is taken to look at each tensor by itself."""
    if kind in KNOWN:
        return "element"
    for dtype, tolerance in _TOLERANCE.items():
        steps = [_values(number, dtype, device) for number in range(_STEPS + 1)]
        try:
            together = _updated(make, steps)
            apart = _updated_apart(make, steps)
            in_rows = _updated_apart(make, [[row for each in values for row in _in_rows(each)] for values in steps])
        except Exception:  # code of the user's own may fail in any way on tensors that it was not made for
            continue
        if not torch.allclose(apart, together, 0.0, tolerance):
            return "all"
        return "element" if torch.allclose(in_rows, together, 0.0, tolerance) else "tensor"
    return "tensor"


def _updated_apart(make: Make, steps: list[list[Tensor]]) -> Tensor:
    """By an optimizer for each tensor."""
    return torch.cat([_updated(make, [[values[number]] for values in steps]) for number in range(len(steps[0]))])


def _updated(make: Make, steps: list[list[Tensor]]) -> Tensor:
    """steps: the tensors, and their gradients in each step."""
    weights = [torch.nn.Parameter(tensor.clone()) for tensor in steps[0]]
    optimizer = make([*weights])
    closure: Any = lambda: torch.zeros((), dtype=weights[0].dtype)  # noqa: E731
    for gradients in steps[1:]:
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.grad = gradient.clone()
        if needs_closure(type(optimizer)):
            optimizer.step(closure)
        else:
            optimizer.step()
    return torch.cat([weight.detach().flatten() for weight in weights])


def needs_closure(kind: type[torch.optim.Optimizer]) -> bool:
    """Whether its step computes the loss again."""
    closure = inspect.signature(kind.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def _in_rows(matrix: Tensor) -> list[Tensor]:
    return list(matrix.flatten().split([_CUT, matrix.numel() - _CUT]))


def _values(seed: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=dtype).to(device) for shape in _SHAPES]
