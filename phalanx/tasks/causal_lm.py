"""Causal language modelling: predict every token from those before it.

Learns from plain text in windows, or from conversations of which only the assistant's turns count: one per row, or
several whole ones packed into a row as documents.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor

from phalanx.tasks.base import (
    IGNORE,
    Batch,
    BrokenRecord,
    Input,
    PackedTask,
    RecordRemark,
    Sample,
    Windows,
    WindowTask,
    count_tokens,
    document_layout,
    mask_of_lengths,
    pad_labelled,
    random_lengths,
    random_starts,
)
from phalanx.tasks.conversations import KINDS, encode_record
from phalanx.tasks.vocabulary import pad_id, random_ids

if TYPE_CHECKING:
    from phalanx.data.tokenizer import Tokenizer


class CausalLM(WindowTask, PackedTask):
    """Labels are the inputs themselves, unshifted: the model shifts them."""

    name: ClassVar[str] = "causal-lm"
    auto_class: ClassVar[str] = "AutoModelForCausalLM"
    modality: ClassVar[Literal["text", "image", "speech"]] = "text"
    kinds: ClassVar[tuple[tuple[str, ...], ...]] = KINDS

    def inputs(self, config: Any, *, padding: bool = False, documents: bool = False) -> tuple[Input, ...]:
        self._check(padding, documents)
        names = ["input_ids", "labels"]
        names += ["attention_mask"] if padding else []
        names += ["position_ids", "document_ids"] if documents else []
        return tuple(Input(name, "int64", ("batch", "tokens")) for name in names)

    def synthetic(
        self, config: Any, *, batch: int, tokens: int, seed: int, padding: bool = False, documents: bool = False
    ) -> Batch:
        self._check(padding, documents)
        generator = torch.Generator().manual_seed(seed)
        ids = random_ids(config, (batch, tokens), generator)
        if not padding:
            starts = random_starts(batch, tokens, generator) if documents else None
            return self.from_windows(Windows(ids, range(batch), starts), config, mask_id=None)
        mask = mask_of_lengths(random_lengths(batch, tokens, generator), tokens)
        return {
            "input_ids": torch.where(mask == 1, ids, pad_id(config)),
            "labels": torch.where(mask == 1, ids, IGNORE),
            "attention_mask": mask,
        }

    def from_windows(self, windows: Windows, config: Any, mask_id: int | None) -> Batch:
        batch = {"input_ids": windows.ids, "labels": windows.ids.clone()}
        if windows.starts is not None:
            # Nothing before a document's first token belongs to it, so there is nothing to predict that token from.
            batch["labels"][:, 1:][windows.starts[:, 1:]] = IGNORE
            batch["position_ids"], batch["document_ids"] = document_layout(windows.starts)
        return batch

    def encode(self, record: Mapping[str, Any], tokenizer: Tokenizer, config: Any, tokens: int) -> list[Sample]:
        samples = encode_record(record, tokenizer)
        if any(len(ids) > tokens for ids, _ in samples):
            warnings.warn(f"are longer than {tokens} tokens and cut off there (seq_len)", RecordRemark, stacklevel=2)
        cut = [{"input_ids": ids[:tokens], "labels": labels[:tokens]} for ids, labels in samples]
        learned = [sample for sample in cut if any(label != IGNORE for label in sample["labels"][1:])]
        if not learned:
            raise BrokenRecord(_nothing_learned([labels for _, labels in samples], tokens))
        return learned

    def collate(self, samples: Sequence[Sample], config: Any, tokens: int) -> Batch:
        return pad_labelled(samples, tokens, pad_id(config))

    def collate_packed(self, rows: Sequence[Sequence[Sample]], config: Any, tokens: int) -> Batch:
        joined = [{key: [i for sample in row for i in sample[key]] for key in ("input_ids", "labels")} for row in rows]
        batch = pad_labelled(joined, tokens, pad_id(config))
        mask, starts = batch.pop("attention_mask"), torch.zeros(len(rows), tokens, dtype=torch.bool)
        for row, begins in zip(rows, starts):
            lengths = [len(sample["input_ids"]) for sample in row]
            begins[[edge for edge in (0, *itertools.accumulate(lengths)) if edge < tokens]] = True
        batch["labels"][starts] = IGNORE
        positions, documents = document_layout(starts)
        # The padding at a row's end is a document that nothing is learned from; the number 0 says so.
        return {**batch, "position_ids": positions, "document_ids": documents * mask}

    def num_tokens(self, batch: Mapping[str, Tensor]) -> int:
        documents = batch.get("document_ids")
        return count_tokens(batch) if documents is None else int((documents != 0).sum())

    def tokens_per_sample(self, tokens: int) -> int:
        return tokens

    def _check(self, padding: bool, documents: bool) -> None:
        if padding and documents:
            raise self.refuse("padding together with documents", "packed documents fill their rows to the end")


def _nothing_learned(labels: Sequence[Sequence[int]], tokens: int) -> str:
    """Why a record teaches nothing: it has no answer, or its answer begins where samples have ended."""
    begins = [place for row in labels for place, label in enumerate(row) if place > 0 and label != IGNORE]
    if not begins:
        return "it has no assistant turn and no completion, so there is nothing to learn"
    return (
        f"what is learned of it begins at token {min(begins) + 1}, and samples have {tokens} tokens: set seq_len to "
        f"{min(begins) + 1} or more"
    )
