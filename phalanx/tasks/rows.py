"""Rows of tokens: padding them, masking the padding, and laying several documents into one row.

Pure functions on tensors that the tasks share; nothing here knows a model or a tokenizer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from phalanx.errors import ConfigError
from phalanx.tasks.base import IGNORE, Batch, Sample


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
