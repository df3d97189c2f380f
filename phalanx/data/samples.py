"""Samples by index: one class per way of storing them, all giving rows of a batch.

A row depends on its index and stream position alone, never on the rows it is asked for with. Ids, labels and lengths
are checked batch by batch against what the model takes, because a model that gets others fails deep inside, and on a
GPU without saying why. In which order samples are visited is decided elsewhere.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from phalanx.data.order import keys
from phalanx.data.stream import GrowingStream, TokenStream
from phalanx.data.tokenizer import Tokenizer
from phalanx.errors import DataError
from phalanx.tasks.base import IGNORE, Batch, Sample, Task, Windows, WindowTask
from phalanx.tasks.custom import Custom
from phalanx.tasks.vocabulary import most_positions, num_token_ids, vocab_size


def longest(task: Task, config: Any) -> tuple[str, int | None]:
    """What the model's configuration calls the most tokens that it takes, and how many those are, where it says."""
    name = "max_target_positions" if task.modality == "speech" else "max_position_embeddings"
    return name, most_positions(config, name)


def require_limits(name: str, batch: Batch, task: Task, config: Any) -> None:
    """Ids, labels and lengths of the user's own samples. What a module of the user's own takes is not known."""
    if isinstance(task, Custom):
        return
    for key in ("input_ids", "labels", "decoder_input_ids"):
        if key not in batch:
            continue
        if key == "labels":
            _require_labels(name, batch[key], config)
        else:
            _require_length(name, batch[key], task, config)
            require_ids(name, batch[key], num_token_ids(config, key))


def require_ids(name: str, ids: Tensor, size: int | None) -> None:
    """size: of the vocabulary; None where the configuration does not say."""
    if size is not None and (wrong := _outside(ids, size)) is not None:
        raise DataError(
            f"{name} holds the token id {wrong}, but the model's vocabulary is 0 … {size - 1}",
            "tokenise the data with the model's tokenizer",
        )


def _require_labels(name: str, labels: Tensor, config: Any) -> None:
    """One for every token, or one class for a sample."""
    known = labels[labels != IGNORE]
    if labels.dim() == 1:
        _require_classes(name, known, getattr(config, "num_labels", 1))
        return
    size = num_token_ids(config, "labels")
    if size is not None and (wrong := _outside(known, size)) is not None:
        raise DataError(
            f"{name} holds the label {wrong}, but the model's vocabulary is 0 … {size - 1}",
            f"tokenise the data with the model's tokenizer; {IGNORE} marks tokens that are not to be predicted",
        )


def _require_classes(name: str, labels: Tensor, size: int) -> None:
    """A model with a single label takes any number: it is not a class then."""
    if size > 1 and (wrong := _outside(labels, size)) is not None:
        raise DataError(
            f"{name} holds the label {wrong}, but the model's labels are 0 … {size - 1}",
            "number the classes from 0, and set the option model_options num_labels=… to how many there are",
        )


def _require_length(name: str, ids: Tensor, task: Task, config: Any) -> None:
    limited_by, limit = longest(task, config)
    tokens = ids.shape[-1]
    if limit is not None and tokens > limit:
        raise DataError(
            f"a sample of {name} has {tokens} tokens, more than the model takes ({limited_by} allows {limit})",
            f"cut samples to {limit} tokens or less in the dataset or in collate",
        )


def _outside(values: Tensor, size: int) -> int | None:
    """One of the values that are not in 0 … size - 1."""
    if not values.numel():
        return None
    low, high = (int(end) for end in torch.aminmax(values))
    return low if low < 0 else high if high >= size else None


Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Request:
    """What samples are wanted for."""

    task: Task
    config: Any
    tokenizer: Tokenizer | None
    tokens: int
    seed: int
    documents: bool
    on_broken: str
    cache: Path
    text_key: str


class Samples(ABC):
    """Rows by index. `num_samples` is None for a stream whose end has not been seen."""

    num_samples: int | None
    description: str
    padding: bool
    documents: bool

    @abstractmethod
    def rows(self, indices: Indices, positions: Indices) -> Batch:
        """The samples at `indices`, visited at these stream positions."""


class WindowSamples(Samples):
    """Windows of a token stream that is all there."""

    padding = False

    def __init__(self, stream: TokenStream, request: Request, name: str) -> None:
        self.documents = request.documents
        self.num_samples = len(stream.tokens) // request.tokens
        self.description = f"{name}: {len(stream.tokens):,} tokens"
        self._stream, self._request, self._name = stream, request, name
        if not self.num_samples:
            raise too_few_tokens(name, len(stream.tokens), request.tokens)

    def rows(self, indices: Indices, positions: Indices) -> Batch:
        return cut_windows(self._stream, self._request, self._name, indices, positions)


class ArrivingSamples(Samples):
    """Windows of a stream that is read as far as it is asked for. When it ends, it begins again."""

    padding = False

    def __init__(self, stream: GrowingStream, request: Request, name: str) -> None:
        self.num_samples = None
        self.documents = request.documents
        self.description = f"{name}: a stream, in the order it arrives"
        self._stream, self._request, self._name = stream, request, name
        if len(stream.read(request.tokens).tokens) < request.tokens:
            raise too_few_tokens(name, len(stream.read(0).tokens), request.tokens)

    def rows(self, indices: Indices, positions: Indices) -> Batch:
        stream = self._stream.read((int(indices.max()) + 1) * self._request.tokens)
        if self._stream.exhausted:
            self.num_samples = len(stream.tokens) // self._request.tokens
            indices = indices % self.num_samples
        return cut_windows(stream, self._request, self._name, indices, positions)


class RecordSamples(Samples):
    """Samples of different lengths, padded by the task. `load` makes a sample from an item when it is asked for."""

    documents = False

    def __init__(self, items: Sequence[Any], load: Callable[[Any], Sample], request: Request, name: str) -> None:
        self.num_samples = len(items)
        self.description = name
        self.padding = request.task.modality == "text"
        self._items, self._load, self._request = items, load, request
        if not items:
            raise DataError(f"{name} holds no samples", "give data with at least one")

    def rows(self, indices: Indices, positions: Indices) -> Batch:
        samples = [self._load(self._items[index]) for index in indices]
        return self._request.task.collate(samples, self._request.config, self._request.tokens)


def cut_windows(stream: TokenStream, request: Request, name: str, indices: Indices, positions: Indices) -> Batch:
    """Windows as a batch of the task."""
    task, tokenizer = request.task, request.tokenizer
    assert isinstance(task, WindowTask)
    ids = stream.windows(indices, request.tokens)
    require_ids(name, torch.from_numpy(ids), vocab_size(request.config))
    starts = torch.from_numpy(stream.starts(indices, request.tokens)) if request.documents else None
    windows = Windows(torch.from_numpy(ids), keys(request.seed, positions), starts)
    return task.from_windows(windows, request.config, tokenizer.mask_id if tokenizer else None)


def too_few_tokens(name: str, num_tokens: int, wanted: int) -> DataError:
    if not num_tokens:
        return DataError(f"{name} holds no text", "give data that is not empty")
    return DataError(
        f"{name} holds {num_tokens} tokens, too few for one sample of {wanted}",
        f"give more text, or lower the sample length to {num_tokens} or less",
    )


def as_batch(columns: Mapping[str, Any]) -> Batch:
    """Columns as CPU tensors: int64, float32, or float64 where they are given so."""
    tensors = {name: torch.as_tensor(column).cpu() for name, column in columns.items()}
    return {name: _plain(tensor) for name, tensor in tensors.items()}


def _plain(tensor: Tensor) -> Tensor:
    if tensor.is_floating_point():
        return tensor if tensor.dtype == torch.float64 else tensor.float()
    return tensor.to(torch.int64)


_NUM_SAMPLES = 10_000


def is_synthetic(data: object) -> bool:
    return isinstance(data, str) and data.split(":")[0] == "synthetic"


class SyntheticSamples(Samples):
    """Sample i is a function of (seed, i)."""

    padding = False

    def __init__(self, data: str, request: Request) -> None:
        self.num_samples = _num_samples(data)
        self.documents = request.documents
        self.description = "synthetic"
        self._request = request

    def rows(self, indices: Indices, positions: Indices) -> Batch:
        request = self._request
        rows = [
            request.task.synthetic(
                request.config, batch=1, tokens=request.tokens, seed=key, documents=request.documents
            )
            for key in keys(request.seed, indices)
        ]
        return {name: torch.cat([row[name] for row in rows]) for name in rows[0]}


def _num_samples(data: str) -> int:
    _, colon, number = data.partition(":")
    if not colon:
        return _NUM_SAMPLES
    if not number.isdecimal() or int(number) < 1:
        raise DataError(f"data {data!r} does not say how many samples", "write e.g. synthetic:1000, or only synthetic")
    return int(number)
