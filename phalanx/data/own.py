"""The user's own map-style dataset: anything with a length whose items are dicts of tensors.

What it yields is checked against what the task's model is called with, at the first sample, not deep inside a step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from phalanx.data.samples import Indices, Request, Samples, as_batch, require_limits
from phalanx.errors import DataError
from phalanx.tasks.base import Batch
from phalanx.tasks.vocabulary import shift_right

Collate = Callable[[list[Any]], Mapping[str, Any]]


def is_own_dataset(data: Any) -> bool:
    """Whether this is a dataset rather than the name of one, or a list of names."""
    if isinstance(data, str | Mapping) or not (hasattr(data, "__getitem__") and hasattr(data, "__len__")):
        return False
    return not isinstance(data, Sequence) or (len(data) > 0 and not isinstance(data[0], str | Path))


def shown(data: Any) -> str:
    """Data in an error message: its name, or its kind, for it may be large."""
    return repr(data) if isinstance(data, str) else str(data) if isinstance(data, Path) else f"a {type(data).__name__}"


class OwnSamples(Samples):
    """Items of the user's dataset; stacked, unless the user says how to collate them."""

    def __init__(self, dataset: Any, collate: Collate | None, request: Request) -> None:
        self.num_samples = len(dataset)
        self.description = type(dataset).__name__
        self._dataset, self._collate, self._request = dataset, collate or _stack, request
        if not self.num_samples:
            raise DataError(f"{type(dataset).__name__} holds no samples", "give a dataset with at least one")
        first = self._batch([0])
        self.padding, self.documents = "attention_mask" in first, "document_ids" in first
        self._check(first)
        self._require_limits(first)

    def rows(self, indices: Indices, positions: Indices) -> Batch:
        batch = self._batch(indices.tolist())
        self._require_limits(batch)
        return batch

    def _require_limits(self, batch: Batch) -> None:
        require_limits(type(self._dataset).__name__, batch, self._request.task, self._request.config)

    def _batch(self, indices: list[int]) -> Batch:
        columns = self._collate([self._dataset[index] for index in indices])
        if not isinstance(columns, Mapping):
            raise DataError(f"collate returned a {type(columns).__name__}", "return a dict of tensors by input name")
        batch, config = as_batch(columns), self._request.config
        expected = {wanted.name for wanted in self._request.task.inputs(config)}
        return with_decoder_inputs(batch, config) if "decoder_input_ids" in expected else batch

    def _check(self, batch: Batch) -> None:
        task, name = self._request.task, type(self._dataset).__name__
        if self._request.documents and not self.documents:
            raise DataError(f"{name} yields no document_ids", "add them and position_ids, or leave documents out")
        wanted = {i.name: i for i in task.inputs(self._request.config, padding=self.padding, documents=self.documents)}
        if set(wanted) != set(batch):
            raise DataError(
                f"{name} yields {', '.join(sorted(batch))}; task {task.name} takes {', '.join(sorted(wanted))}",
                "return exactly these from the dataset or from collate",
            )
        for key, tensor in batch.items():
            kind = "float" if tensor.is_floating_point() else "int64"
            if kind != wanted[key].dtype or tensor.dim() != len(wanted[key].dims):
                raise DataError(
                    f"{key} of {name} is {kind} of shape {list(tensor.shape)}; "
                    f"task {task.name} takes {wanted[key].dtype} of shape [{', '.join(map(str, wanted[key].dims))}]",
                    "convert it in the dataset or in collate",
                )


def with_decoder_inputs(batch: Batch, config: Any) -> Batch:
    """What a decoder is given follows from the labels, where they are all there is."""
    if "labels" not in batch or "decoder_input_ids" in batch:
        return batch
    return {**batch, "decoder_input_ids": shift_right(batch["labels"], config)}


def _stack(samples: list[Any]) -> Mapping[str, Any]:
    if not all(isinstance(sample, Mapping) for sample in samples):
        raise DataError(
            f"a sample of the dataset is a {type(samples[0]).__name__}, not a dict",
            "return dicts of tensors, or give a collate function",
        )
    try:
        return {key: torch.stack([torch.as_tensor(sample[key]) for sample in samples]) for key in samples[0]}
    except (RuntimeError, KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"the samples of the dataset cannot be stacked ({error})",
            "return equal keys and shapes, or give a collate function",
        ) from error
