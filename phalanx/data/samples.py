"""Samples by index: one class per way of storing them, all giving rows of a batch.

A row depends on its index and stream position alone, never on the rows it is asked for with. In which order samples
are visited is decided elsewhere.
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

from phalanx.data.limits import require_ids
from phalanx.data.noise import keys
from phalanx.data.stream import GrowingStream, TokenStream
from phalanx.data.tokenizer import Tokenizer
from phalanx.errors import DataError
from phalanx.tasks.base import Batch, Sample, Task, Windows, WindowTask
from phalanx.tasks.vocabulary import vocab_size

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
    """Columns as CPU tensors, int64 or float32."""
    tensors = {name: torch.as_tensor(column).cpu() for name, column in columns.items()}
    return {name: t.float() if t.is_floating_point() else t.to(torch.int64) for name, t in tensors.items()}
