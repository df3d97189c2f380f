"""An encoder reads, a decoder writes: text to text, and speech to text as Whisper does it.

For text, `tokens` is the length of the source; the target gets three quarters of it, so that the two never look alike.
For speech it is the length of the transcript; the encoder's length (log-mel features) is fixed by the configuration.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor

from phalanx.errors import ModelError
from phalanx.tasks.base import (
    IGNORE,
    Batch,
    BrokenRecord,
    Input,
    RecordTask,
    Sample,
    Task,
    count_labels,
    count_tokens,
    mask_of_lengths,
    mask_of_rows,
    pad_rows,
    random_lengths,
)
from phalanx.tasks.vocabulary import pad_id, random_ids, shift_right

if TYPE_CHECKING:
    from phalanx.data.tokenizer import Tokenizer


def target_length(tokens: int) -> int:
    """The decoder's length for a source of `tokens`."""
    return max(2, tokens * 3 // 4)


class TextToText(RecordTask):
    """The source is padded by a mask; the decoder by its labels, because it is causal."""

    name: ClassVar[str] = "text-to-text"
    auto_class: ClassVar[str] = "AutoModelForSeq2SeqLM"
    modality: ClassVar[Literal["text", "image", "speech"]] = "text"
    kinds: ClassVar[tuple[tuple[str, ...], ...]] = (("source", "target"),)

    def inputs(self, config: Any, *, padding: bool = False, documents: bool = False) -> tuple[Input, ...]:
        self._check(documents)
        names = {"input_ids": "source", "decoder_input_ids": "tokens", "labels": "tokens"}
        names |= {"attention_mask": "source"} if padding else {}
        return tuple(Input(name, "int64", ("batch", dim)) for name, dim in names.items())

    def synthetic(
        self, config: Any, *, batch: int, tokens: int, seed: int, padding: bool = False, documents: bool = False
    ) -> Batch:
        self._check(documents)
        generator = torch.Generator().manual_seed(seed)
        ids = random_ids(config, (batch, tokens), generator)
        length = target_length(tokens)
        labels = random_ids(config, (batch, length), generator)
        if not padding:
            return {"input_ids": ids, "decoder_input_ids": shift_right(labels, config), "labels": labels}
        mask = mask_of_lengths(random_lengths(batch, tokens, generator), tokens)
        target_mask = mask_of_lengths(random_lengths(batch, length, generator), length)
        labels = torch.where(target_mask == 1, labels, IGNORE)
        return {
            "input_ids": torch.where(mask == 1, ids, pad_id(config)),
            "attention_mask": mask,
            "decoder_input_ids": shift_right(labels, config),
            "labels": labels,
        }

    def encode(self, record: Mapping[str, Any], tokenizer: Tokenizer, config: Any, tokens: int) -> list[Sample]:
        for field in self.kinds[0]:
            if not isinstance(record[field], str) or not record[field]:
                raise BrokenRecord(f"the {field} is empty or not a string")
        (source,) = tokenizer.encode([record["source"]], special=True, limit=tokens)
        (target,) = tokenizer.encode([record["target"]], special=True, limit=target_length(tokens))
        return [{"input_ids": source, "labels": target}]

    def collate(self, samples: Sequence[Sample], config: Any, tokens: int) -> Batch:
        rows = [sample["input_ids"] for sample in samples]
        labels = pad_rows([sample["labels"] for sample in samples], target_length(tokens), IGNORE)
        return {
            "input_ids": pad_rows(rows, tokens, pad_id(config)),
            "attention_mask": mask_of_rows(rows, tokens),
            "decoder_input_ids": shift_right(labels, config),
            "labels": labels,
        }

    def num_tokens(self, batch: Mapping[str, Tensor]) -> int:
        return count_tokens(batch) + count_labels(batch)

    def tokens_per_sample(self, tokens: int) -> int:
        return tokens + target_length(tokens)

    def _check(self, documents: bool) -> None:
        if documents:
            raise self.refuse("documents", "each sample is one source with one target")


def feature_shape(config: Any) -> tuple[int, int]:
    """Mel bins and frames of the features; the first convolutions halve the frames."""
    if not all(isinstance(getattr(config, name, None), int) for name in ("num_mel_bins", "max_source_positions")):
        raise ModelError(
            f"{type(config).__name__} names no mel bins and frames, so the model does not read spectrograms as "
            "Whisper does",
            "choose a model that does, or hand over your own module and dataset",
        )
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
