"""Speech to text, as Whisper does it: log-mel features of fixed length in, the transcript out.

`tokens` is the length of the transcript; the encoder's length is fixed by the model's configuration.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from phalanx.tasks.base import IGNORE, Batch, Input, Sample, Task
from phalanx.tasks.rows import count_labels, mask_of_lengths, pad_rows, random_lengths
from phalanx.tasks.vocabulary import random_ids, shift_right


def feature_shape(config: Any) -> tuple[int, int]:
    """Mel bins and frames of the features; the first convolutions halve the frames."""
    return config.num_mel_bins, 2 * config.max_source_positions


class SpeechToText(Task):
    """The decoder is padded by its labels; it is causal, so it needs no mask."""

    name: ClassVar[str] = "speech-to-text"
    auto_class: ClassVar[str] = "AutoModelForSpeechSeq2Seq"
    modality: ClassVar[Literal["text", "image", "speech"]] = "speech"

    def inputs(self, config: Any, *, padding: bool = False, documents: bool = False) -> tuple[Input, ...]:
        self._check(documents)
        return (
            Input("input_features", "float", ("batch", *feature_shape(config))),
            Input("decoder_input_ids", "int64", ("batch", "tokens")),
            Input("labels", "int64", ("batch", "tokens")),
        )

    def synthetic(
        self, config: Any, *, batch: int, tokens: int, seed: int, padding: bool = False, documents: bool = False
    ) -> Batch:
        self._check(documents)
        generator = torch.Generator().manual_seed(seed)
        labels = random_ids(config, (batch, tokens), generator)
        if padding:
            mask = mask_of_lengths(random_lengths(batch, tokens, generator), tokens)
            labels = torch.where(mask == 1, labels, IGNORE)
        features = torch.randn(batch, *feature_shape(config), generator=generator)
        return {"input_features": features, "decoder_input_ids": shift_right(labels, config), "labels": labels}

    def collate(self, samples: Sequence[Sample], config: Any, tokens: int) -> Batch:
        labels = pad_rows([sample["labels"] for sample in samples], tokens, IGNORE)
        features = torch.stack([sample["input_features"] for sample in samples])
        return {"input_features": features, "decoder_input_ids": shift_right(labels, config), "labels": labels}

    def num_tokens(self, batch: Mapping[str, Tensor]) -> int:
        return count_labels(batch)

    def tokens_per_sample(self, tokens: int) -> int:
        return tokens

    def _check(self, documents: bool) -> None:
        if documents:
            raise self.refuse("documents", "each sample is one recording with one transcript")
