"""Does an optimizer update each element by itself? Only then may a rank that holds a part of a tensor update that part.

Torch's own are known. Others are tried out: a small matrix is updated whole, and beside it the same elements in two
rows; whoever looks at shapes, norms, rows or columns gives other values.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

KNOWN = (
    torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD, torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.Adamax,
    torch.optim.NAdam, torch.optim.RAdam, torch.optim.RMSprop, torch.optim.Rprop, torch.optim.ASGD,
)  # fmt: skip
_SHAPE, _CUT, _STEPS = (4, 6), 7, 3
_TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}

Make = Callable[[list[Tensor]], torch.optim.Optimizer]


def is_element_wise(kind: type[torch.optim.Optimizer], make: Make, device: torch.device) -> bool:
    """make: an optimizer of this kind for these tensors, with the arguments of the one that is asked about."""
    if kind in KNOWN:
        return True
    for dtype, tolerance in _TOLERANCE.items():
        values = [_values(number, dtype, device) for number in range(_STEPS + 1)]
        try:
            whole, rows = _updated(make, [[each] for each in values]), _updated(make, [_in_rows(v) for v in values])
        except Exception:  # code of the user's own may fail in any way on tensors that it was not made for
            continue
        return bool(torch.allclose(rows, whole, 0.0, tolerance))
    return False


def _updated(make: Make, values: list[list[Tensor]]) -> Tensor:
    """values: the tensors, and their gradients in each step."""
    weights = [torch.nn.Parameter(tensor.clone()) for tensor in values[0]]
    optimizer = make([*weights])
    for gradients in values[1:]:
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.grad = gradient.clone()
        optimizer.step()
    return torch.cat([weight.detach().flatten() for weight in weights])


def _in_rows(matrix: Tensor) -> list[Tensor]:
    return list(matrix.flatten().split([_CUT, matrix.numel() - _CUT]))


def _values(seed: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.randn(_SHAPE, generator=torch.Generator().manual_seed(seed), dtype=dtype).to(device)
