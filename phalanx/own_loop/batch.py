"""Batches as a loop of the user's own has them — a dict, a tuple, a tensor — as the model's inputs by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from phalanx.data.own import with_decoder_inputs
from phalanx.engine.inputs import num_samples
from phalanx.errors import ConfigError, DataError
from phalanx.model.separable import require_labels
from phalanx.session.session import Session
from phalanx.tasks.base import Batch

TARGET = "target"  # of a batch without names, what the loss takes


class BatchForm:
    """arguments: of the model's forward, in order; None where it takes any. target: the name of the last of a batch
    without names, where a loss function takes it. config: of a HuggingFace model whose decoder's inputs follow from the
    labels, where the batch does not hold them."""

    def __init__(self, arguments: Sequence[str] | None, target: str | None = None, config: Any = None) -> None:
        self._arguments, self._target, self._config = arguments, target, config

    def __call__(self, batch: Any) -> Batch:
        named = {str(name): _tensor(name, value) for name, value in self._named(batch).items()}
        samples = {tensor.shape[0] for tensor in named.values()}
        if len(samples) != 1 or 0 in samples:
            shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in named.items())
            raise DataError(
                f"the tensors of a batch differ in their number of samples, or have none: {shapes}",
                "the first dim of every tensor is the sample",
            )
        return named if self._config is None else with_decoder_inputs(named, self._config)

    def _named(self, batch: Any) -> Mapping[str, Any]:
        if isinstance(batch, Mapping) or hasattr(batch, "keys"):
            if not batch:
                raise DataError("a batch is an empty dict", "give the model's inputs by name")
            return cast(Mapping[str, Any], batch)
        values: list[Any] = [batch] if isinstance(batch, Tensor) else batch
        if not isinstance(values, list | tuple) or not values:
            raise DataError(
                f"a batch is a {type(batch).__name__}", "give a dict of tensors by input name, a tuple, or a tensor"
            )
        names = [*(self._arguments or ())[: len(values) - (self._target is not None)]]
        names += [self._target] if self._target is not None else []
        if len(names) != len(values):
            taken = ", ".join(self._arguments) if self._arguments else "inputs by name only"
            raise DataError(
                f"a batch holds {len(values)} tensors without names, and forward takes {taken}",
                "give a dict of tensors by input name; of a tuple, the last one goes to the loss function, if there is "
                "one",
            )
        return dict(zip(names, values, strict=True))


def _tensor(name: Any, value: Any) -> Tensor:
    if not isinstance(value, Tensor) or value.dim() == 0:
        what = "a number without samples" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        raise DataError(f"{name!r} in a batch is {what}", "give tensors whose first dim is the sample")
    return value if value.is_floating_point() else value.to(torch.int64)


def part_of(session: Session, given: Batch, samples: int, with_labels: bool = True) -> tuple[Batch, int, int]:
    """A rank's part of a global batch, its place in the stream, of which so many samples came before, and in the
    batch. with_labels: whether parts must have some, where the plan cuts the batch."""
    refuse_gradients(given)
    plan = session.plan
    if with_labels and plan.dp * plan.mb * plan.multiple > 1:
        require_labels(session.compiled.captured, given, plan.shown)
    first, count = session.part(samples, num_samples(given))
    begin = first - samples
    return {name: tensor[begin : begin + count] for name, tensor in given.items()}, first, begin


def refuse_gradients(given: Batch) -> None:
    """Nothing goes back from a model to what it was given."""
    for name, tensor in given.items():
        if tensor.requires_grad and torch.is_grad_enabled():
            raise ConfigError(
                f"input {name!r} of a batch requires a gradient, and none comes back from a session to its inputs",
                f"give {name}.detach(); where you need this gradient, put what makes {name} and this model into one "
                "module, or keep this model an ordinary module on every rank",
            )


def refuse_autocast(device: torch.device) -> None:
    """It would change what some of the model's operators compute, forwards only."""
    if torch.is_autocast_enabled(device.type):
        raise ConfigError(
            "a session was called under torch.autocast, which it does not follow",
            "open it with dtype='bfloat16' (or 'float16'), which keeps float32 weights for the update, and call it "
            "outside of autocast; your own loss may be under it",
        )
