"""The task of a module of the user's own: its inputs are whatever the user's dataset yields.

It is made from a first batch instead of a name, and knows no text; the loss is the module's own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

from torch import Tensor

from phalanx.errors import CaptureError, DataError
from phalanx.tasks.base import Batch, Input, Sample, Task


class Custom(Task):
    """Counts samples where text tasks count tokens."""

    name: ClassVar[str] = "custom"
    auto_class: ClassVar[str] = ""
    modality: ClassVar[Literal["text", "image", "speech"]] = "image"  # no tokens, so no sample length to check

    def __init__(self, inputs: tuple[Input, ...]) -> None:
        self._inputs = inputs

    def inputs(self, config: Any, *, padding: bool = False, documents: bool = False) -> tuple[Input, ...]:
        return self._inputs

    def synthetic(
        self, config: Any, *, batch: int, tokens: int, seed: int, padding: bool = False, documents: bool = False
    ) -> Batch:
        raise DataError("synthetic samples cannot be made for a module of your own", "give a dataset of your own")

    def collate(self, samples: Sequence[Sample], config: Any, tokens: int) -> Batch:
        raise DataError("samples of a module of your own are collated by you", "give a dataset of your own")

    def num_tokens(self, batch: Mapping[str, Tensor]) -> int:
        return next(iter(batch.values())).shape[0]

    def tokens_per_sample(self, tokens: int) -> int:
        return 1


def infer_inputs(batch: dict[str, Tensor]) -> tuple[Input, ...]:
    """What a module of the user's own is called with, read off a batch: samples are dynamic, all else is as here."""
    if not batch or any(tensor.dim() == 0 for tensor in batch.values()):
        raise CaptureError(
            "a batch must be a dict of tensors whose first dim is the sample", "see 'Your own dataset' in docs/guide.md"
        )
    return tuple(
        Input(name, "float" if t.is_floating_point() else "int64", ("batch", *t.shape[1:])) for name, t in batch.items()
    )


_DIMS = ("batch", "tokens", "source")


def with_dims(inputs: tuple[Input, ...], dims: Mapping[str, Sequence[str | int]]) -> tuple[Input, ...]:
    """The same inputs, some of whose dims differ between batches: by input, what each of its dims is."""
    known = {each.name: each for each in inputs}
    for name, given in dims.items():
        if name not in known:
            raise DataError(f"dims: the batch holds no {name!r}", f"name one of {', '.join(known)}")
        own = known[name].dims
        fits = len(given) == len(own) and all(d in _DIMS or d == size for d, size in zip(given, own, strict=True))
        if not fits or given[0] != "batch":
            raise DataError(
                f"dims: {name!r} of shape [{', '.join(map(str, own))}] is not {list(given)}",
                "give for every dim its size or, where that differs between batches, tokens or source; the first is "
                "batch",
            )
    return tuple(replace(each, dims=tuple(dims.get(each.name, each.dims))) for each in inputs)
