"""Masked language modelling: predict hidden tokens from both sides, with BERT's recipe.

15 % of the tokens are to be predicted; of these 80 % are replaced by the mask token, 10 % by a random one and 10 %
are left as they are. What is drawn for a row depends on that row's key alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from phalanx.errors import DataError
from phalanx.tasks.base import (
    IGNORE,
    Batch,
    Input,
    Sample,
    Windows,
    WindowTask,
    count_tokens,
    mask_of_lengths,
    pad_labelled,
    random_lengths,
)
from phalanx.tasks.vocabulary import pad_id, random_ids, vocab_size

_HIDDEN, _MASKED, _RANDOM = 0.15, 0.8, 0.9


class MaskedLM(WindowTask):
    """Labels are the original tokens where something was hidden."""

    name: ClassVar[str] = "masked-lm"
    auto_class: ClassVar[str] = "AutoModelForMaskedLM"
    modality: ClassVar[Literal["text", "image", "speech"]] = "text"

    def inputs(self, config: Any, *, padding: bool = False, documents: bool = False) -> tuple[Input, ...]:
        self._check(documents)
        names = ["input_ids", "labels", *(["attention_mask"] if padding else [])]
        return tuple(Input(name, "int64", ("batch", "tokens")) for name in names)

    def synthetic(
        self, config: Any, *, batch: int, tokens: int, seed: int, padding: bool = False, documents: bool = False
    ) -> Batch:
        self._check(documents)
        generator = torch.Generator().manual_seed(seed)
        ids = random_ids(config, (batch, tokens), generator)
        lengths = random_lengths(batch, tokens, generator) if padding else torch.full((batch,), tokens)
        keys = torch.randint(0, 2**62, (batch,), generator=generator).tolist()
        mask = mask_of_lengths(lengths, tokens)
        ids, labels = hide(ids, mask, keys, mask_id=vocab_size(config) - 1, size=vocab_size(config))
        built = {"input_ids": torch.where(mask == 1, ids, pad_id(config)), "labels": labels}
        return {**built, "attention_mask": mask} if padding else built

    def from_windows(self, windows: Windows, config: Any, mask_id: int | None) -> Batch:
        if mask_id is None:
            raise DataError(
                "task masked-lm hides tokens behind a mask token, but the tokenizer has none",
                "choose a tokenizer with a mask token, or tokenizer=bytes",
            )
        mask = torch.ones_like(windows.ids)
        ids, labels = hide(windows.ids, mask, windows.keys, mask_id=mask_id, size=vocab_size(config))
        return {"input_ids": ids, "labels": labels}

    def collate(self, samples: Sequence[Sample], config: Any, tokens: int) -> Batch:
        return pad_labelled(samples, tokens, pad_id(config))

    def num_tokens(self, batch: Mapping[str, Tensor]) -> int:
        return count_tokens(batch)

    def tokens_per_sample(self, tokens: int) -> int:
        return tokens

    def _check(self, documents: bool) -> None:
        if documents:
            raise self.refuse("documents", "HuggingFace keeps packed documents apart in causal attention only")


def hide(ids: Tensor, mask: Tensor, keys: Sequence[int], *, mask_id: int, size: int) -> tuple[Tensor, Tensor]:
    """Inputs with hidden tokens, and labels. As in BERT the number hidden is fixed by the row's length; at least 2."""
    hidden, labels = ids.clone(), torch.full_like(ids, IGNORE)
    for row, key in enumerate(keys):
        generator = torch.Generator().manual_seed(key)
        length = int(mask[row].sum())
        count = max(2, round(_HIDDEN * length))
        chosen = torch.randperm(length, generator=generator)[:count]
        fate = torch.rand(len(chosen), generator=generator)
        other = torch.randint(0, size, (len(chosen),), generator=generator)
        kept = ids[row, chosen]
        hidden[row, chosen] = torch.where(fate < _MASKED, mask_id, torch.where(fate < _RANDOM, other, kept))
        labels[row, chosen] = kept
    return hidden, labels
