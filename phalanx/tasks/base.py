"""What a task is: the inputs a model is called with, and how samples become such inputs.

Tasks know HuggingFace configurations and tokenizers, never files, plans or devices. Each task is final; two kinds of
them say which text data a task can learn from. Below are pure functions on rows of tokens that tasks share: padding
them, masking the padding, and laying several documents into one row.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor

from phalanx.errors import ConfigError

if TYPE_CHECKING:
    from phalanx.data.tokenizer import Tokenizer

Batch = dict[str, Tensor]
Sample = dict[str, Any]

# Labels with this value take no part in the loss; HuggingFace's models and torch's cross-entropy agree on it.
IGNORE = -100

# Inputs that only our captured models take: HuggingFace derives them from position_ids and labels.
_DERIVED = ("document_ids", "decoder_input_ids")


@dataclass(frozen=True)
class Input:
    """One argument of the model. A str in `dims` names a dynamic dim: "batch", "tokens" or "source"."""

    name: str
    dtype: Literal["int64", "float"]  # "float" is the dtype the model computes in
    dims: tuple[str | int, ...]


@dataclass(frozen=True)
class Windows:
    """Rows cut from a token stream, and the randomness that belongs to them."""

    ids: Tensor  # [rows, tokens]
    keys: Sequence[int]  # one per row: seeds whatever the task draws for that row
    starts: Tensor | None = None  # [rows, tokens] bool: a document begins here; None when boundaries don't matter


class RecordRemark(UserWarning):
    """What should be known about a record that is learned from: the end of a sentence about some records."""


class BrokenRecord(Exception):
    """A record that a task cannot learn from; the message is the reason, without the place."""


class Task(ABC):
    """What a model is trained to do."""

    name: ClassVar[str]
    auto_class: ClassVar[str]
    modality: ClassVar[Literal["text", "image", "speech"]]

    @property
    def unit(self) -> str:
        """What `num_tokens` counts."""
        return "samples" if self.modality == "image" else "tokens"

    @abstractmethod
    def inputs(self, config: Any, *, padding: bool = False, documents: bool = False) -> tuple[Input, ...]:
        """What the model is called with, labels included."""

    @abstractmethod
    def synthetic(
        self, config: Any, *, batch: int, tokens: int, seed: int, padding: bool = False, documents: bool = False
    ) -> Batch:
        """A random valid batch that matches `inputs`; a function of its arguments alone."""

    @abstractmethod
    def collate(self, samples: Sequence[Sample], config: Any, tokens: int) -> Batch:
        """Samples of different lengths as one batch. Rows are padded to `tokens` whatever the other samples are, so
        that a rank can produce its part of a batch without knowing the rest."""

    @abstractmethod
    def num_tokens(self, batch: Mapping[str, Tensor]) -> int:
        """How many tokens (for images: samples) the batch holds, padding left out."""

    @abstractmethod
    def tokens_per_sample(self, tokens: int) -> int:
        """How many tokens a sample without padding holds, in the unit of `num_tokens`."""

    def reference_inputs(self, batch: Mapping[str, Tensor]) -> Batch:
        """What the plain HuggingFace model is given for the same batch."""
        return {name: tensor for name, tensor in batch.items() if name not in _DERIVED}

    def refuse(self, option: str, reason: str) -> ConfigError:
        """The error for an option that this task cannot take."""
        return ConfigError(f"task {self.name} cannot take {option}: {reason}", f"leave {option} out")


class WindowTask(Task):
    """A task that learns from plain text, cut into windows of equal length."""

    @abstractmethod
    def from_windows(self, windows: Windows, config: Any, mask_id: int | None) -> Batch:
        """The batch for these windows. `mask_id` is the tokenizer's mask token, if it has one."""


class RecordTask(Task):
    """A task that learns from records: one JSON object, or one row of a dataset, per sample."""

    # What a record must hold: all fields of one kind, "text" standing for the field the user chose.
    kinds: ClassVar[tuple[tuple[str, ...], ...]]

    @abstractmethod
    def encode(self, record: Mapping[str, Any], tokenizer: Tokenizer, config: Any, tokens: int) -> list[Sample]:
        """A record as samples for `collate`, at least one; raises BrokenRecord."""


class PackedTask(RecordTask):
    """A task that can learn from several samples in one row, kept apart as documents."""

    @abstractmethod
    def collate_packed(self, rows: Sequence[Sequence[Sample]], config: Any, tokens: int) -> Batch:
        """Rows of samples that fit into `tokens` together, as one batch."""


def pad_rows(rows: Sequence[Sequence[int]], length: int, value: int) -> Tensor:
    """Rows cut or filled to one length: [rows, length]."""
    padded = torch.full((len(rows), length), value, dtype=torch.int64)
    for index, row in enumerate(rows):
        kept = torch.as_tensor(row[:length], dtype=torch.int64)
        padded[index, : len(kept)] = kept
    return padded


def mask_of_rows(rows: Sequence[Sequence[int]], length: int) -> Tensor:
    """The attention mask of `pad_rows`: 1 on tokens, 0 on padding."""
    return mask_of_lengths(torch.tensor([min(len(row), length) for row in rows]), length)


def pad_labelled(samples: Sequence[Sample], length: int, padding: int) -> Batch:
    """Samples that have a label for every token, as one batch."""
    rows = [sample["input_ids"] for sample in samples]
    return {
        "input_ids": pad_rows(rows, length, padding),
        "labels": pad_rows([sample["labels"] for sample in samples], length, IGNORE),
        "attention_mask": mask_of_rows(rows, length),
    }


def mask_of_lengths(lengths: Tensor, length: int) -> Tensor:
    return (torch.arange(length)[None, :] < lengths[:, None]).to(torch.int64)


def random_lengths(batch: int, length: int, generator: torch.Generator) -> Tensor:
    """Row lengths that exercise padding: the first row full, the last strongly padded, all at least 2."""
    shortest = max(2, length // 4)
    if batch == 1:
        return torch.tensor([max(2, length // 2)])
    lengths = torch.randint(shortest, length + 1, (batch,), generator=generator)
    lengths[0], lengths[-1] = length, shortest
    return lengths


def random_starts(batch: int, length: int, generator: torch.Generator) -> Tensor:
    """Where documents begin: 2 to 4 per row, each of at least two tokens. [batch, length] bool"""
    if length < 4:
        raise ConfigError(f"two documents of two tokens do not fit in {length}", "give a sample at least 4 tokens")
    starts = torch.zeros(batch, length, dtype=torch.bool)
    for row in starts:
        count = int(torch.randint(2, min(4, length // 2) + 1, (), generator=generator))
        # Weights 1 … count in random order make the lengths differ wherever there is room for it.
        weights = torch.randperm(count, generator=generator) + 1
        lengths = 2 + (length - 2 * count) * weights // weights.sum()
        row[0] = True
        row[lengths.cumsum(0)[:-1]] = True
    return starts


def document_layout(starts: Tensor) -> tuple[Tensor, Tensor]:
    """Positions that restart with every document, and the documents' numbers in their row from 1."""
    column = torch.arange(starts.shape[1]).expand(starts.shape)
    begins = torch.where(starts, column, 0).cummax(dim=1).values
    return column - begins, starts.to(torch.int64).cumsum(dim=1)


def count_tokens(batch: Mapping[str, Tensor]) -> int:
    """Tokens of `input_ids` that are not padding."""
    mask = batch.get("attention_mask")
    return batch["input_ids"].numel() if mask is None else int(mask.sum())


def count_labels(batch: Mapping[str, Tensor]) -> int:
    return int((batch["labels"] != IGNORE).sum())
