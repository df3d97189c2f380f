"""A model whose forward goes on with something else: a loss function, or the gate through which outputs leave.

The result is the same module with the same names of parameters and parts, so that it is read, cut and split as the
model is; the user's module is left as it was.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch.utils._pytree as pytree
from torch import Tensor, nn

from phalanx.errors import CaptureError, ConfigError, DataError
from phalanx.model.ops.leave import ROWS, leave

Inputs = Mapping[str, Tensor]
End = Callable[[Any, Inputs], Tensor]  # what the model gave and what it did not take → the loss
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def attached(model: nn.Module, takes: Collection[str], end: End) -> nn.Module:
    """takes: the inputs that are the model's own."""
    kind, values = type(model), dict(vars(model))
    own: Any = values.pop("forward", None)  # of a module whose forward somebody replaced

    def forward(self: nn.Module, **inputs: Tensor) -> Tensor:
        given = {name: value for name, value in inputs.items() if name in takes}
        output = own(**given) if own is not None else kind.forward(self, **given)
        return end(output, {name: value for name, value in inputs.items() if name not in takes})

    made = object.__new__(type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__}))
    vars(made).update(values)
    return made


class Ends:
    """Which inputs of a batch a model takes, and what is done with its outputs: `loss`, or without one they leave.

    `structure` says how outputs that leave were put together, once the model has been read.
    """

    structure: pytree.TreeSpec | None = None

    def __init__(self, model: nn.Module, names: Sequence[str], loss: Callable[..., Any] | None) -> None:
        self._name, self._loss = type(model).__name__, loss
        if isinstance(loss, nn.Module) and any(True for _ in loss.parameters()):
            raise ConfigError(
                f"loss {type(loss).__name__} has parameters of its own, which would not be trained",
                "make it a part of the model, which then returns the loss itself",
            )
        wanted = (second_arguments(loss) if loss is not None else None) or ()
        known = arguments_of(model.forward)
        self.takes = tuple(name for name in names if name not in wanted and (known is None or name in known))
        self._require(set(names) - set(self.takes), wanted, known)

    def _require(self, rest: set[str], wanted: Sequence[str], known: Sequence[str] | None) -> None:
        if self._loss is None and rest - {ROWS}:
            raise DataError(
                f"forward of {self._name} does not take {', '.join(sorted(rest - {ROWS}))}; it takes "
                f"{', '.join(known or ())}",
                "give the session the model's inputs only; labels are for the loss that you compute outside",
            )
        if self._loss is not None and not rest:
            raise DataError(
                f"the loss gets nothing but the outputs of {self._name}: all of the batch goes to the model",
                f"name in the batch what the loss takes besides ({', '.join(wanted) or 'its second argument'})",
            )

    def __call__(self, model: nn.Module) -> nn.Module:
        return attached(model, self.takes, self._leaving if self._loss is None else self._losing)

    def _losing(self, output: Any, rest: Inputs) -> Tensor:
        assert self._loss is not None
        return self._loss(output, **rest)

    def _leaving(self, output: Any, rest: Inputs) -> Tensor:
        outputs, self.structure = pytree.tree_flatten(without_nothing(output))
        rows = rest[ROWS]
        for number, each in enumerate(outputs):
            _require_rows(self._name, number, each, rows)
        losses = [leave(each, rows, number) for number, each in enumerate(outputs)]
        return sum(losses[1:], start=losses[0]) / rows.shape[0]


def without_nothing(output: Any) -> Any:
    """What HuggingFace's models return as a plain dict; values that are None are left out."""
    if isinstance(output, Mapping):
        return {name: value for name, value in output.items() if value is not None}
    return output


def _require_rows(name: str, number: int, output: Any, rows: Tensor) -> None:
    fits = isinstance(output, Tensor) and output.is_floating_point() and output.dim() > 0
    if not fits or output.shape[0] != rows.shape[0]:
        what = f"of shape {list(output.shape)} and {output.dtype}" if isinstance(output, Tensor) else str(type(output))
        raise CaptureError(
            f"output {number} of {name} cannot leave: it is {what}",
            "every output must be a floating-point tensor whose first dim is the sample; or give a loss function, "
            "which is read together with the model (loss=…)",
        )


def arguments_of(function: Callable[..., Any]) -> tuple[str, ...] | None:
    """The names that a function can be called with; None for any."""
    parameters = inspect.signature(function).parameters.values()
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters):
        named = tuple(each.name for each in parameters if each.kind in _NAMED)
        return named if len(named) > 1 else None  # HuggingFace's take keywords for the attention besides their own
    return tuple(each.name for each in parameters if each.kind in _NAMED)


def second_arguments(loss: Callable[..., Any]) -> tuple[str, ...] | None:
    """What a loss function takes besides the model's output; None for anything."""
    function = loss.forward if isinstance(loss, nn.Module) else loss
    try:
        names = arguments_of(function)
    except (TypeError, ValueError):  # a builtin without a signature
        return None
    if names is not None and len(names) < 2:
        raise ConfigError(
            f"the loss function takes {', '.join(names) or 'no arguments by name'} and nothing besides",
            "give a function of the model's output and of what a batch holds for the loss, such as labels",
        )
    return None if names is None else names[1:]
