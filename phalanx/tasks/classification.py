"""Classification: one label per text, from records with a text and a label, or one label per image."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor

from phalanx.tasks.base import (
    Batch,
    BrokenRecord,
    Input,
    RecordTask,
    Sample,
    Task,
    count_tokens,
    mask_of_lengths,
    mask_of_rows,
    pad_rows,
    random_lengths,
)
from phalanx.tasks.vocabulary import label_index, num_labels, pad_id, random_ids

if TYPE_CHECKING:
    from phalanx.data.tokenizer import Tokenizer


class TextClassification(RecordTask):
    """Texts are cut at `tokens` and padded on the right."""

    name: ClassVar[str] = "text-classification"
    auto_class: ClassVar[str] = "AutoModelForSequenceClassification"
    modality: ClassVar[Literal["text", "image", "speech"]] = "text"
    kinds: ClassVar[tuple[tuple[str, ...], ...]] = (("text", "label"),)

    def inputs(self, config: Any, *, padding: bool = False, documents: bool = False) -> tuple[Input, ...]:
        self._check(documents)
        names = ["input_ids", *(["attention_mask"] if padding else [])]
        return (*(Input(name, "int64", ("batch", "tokens")) for name in names), Input("labels", "int64", ("batch",)))

    def synthetic(
        self, config: Any, *, batch: int, tokens: int, seed: int, padding: bool = False, documents: bool = False
    ) -> Batch:
        self._check(documents)
        generator = torch.Generator().manual_seed(seed)
        ids = random_ids(config, (batch, tokens), generator)
        labels = torch.randint(0, num_labels(config), (batch,), generator=generator)
        if not padding:
            return {"input_ids": ids, "labels": labels}
        mask = mask_of_lengths(random_lengths(batch, tokens, generator), tokens)
        return {"input_ids": torch.where(mask == 1, ids, pad_id(config)), "attention_mask": mask, "labels": labels}

    def encode(self, record: Mapping[str, Any], tokenizer: Tokenizer, config: Any, tokens: int) -> list[Sample]:
        if not isinstance(record["text"], str) or not record["text"]:
            raise BrokenRecord("the text is empty or not a string")
        (ids,) = tokenizer.encode([record["text"]], special=True, limit=tokens)
        return [{"input_ids": ids, "labels": label_index(record["label"], config)}]

    def collate(self, samples: Sequence[Sample], config: Any, tokens: int) -> Batch:
        rows = [sample["input_ids"] for sample in samples]
        return {
            "input_ids": pad_rows(rows, tokens, pad_id(config)),
            "attention_mask": mask_of_rows(rows, tokens),
            "labels": torch.tensor([sample["labels"] for sample in samples]),
        }

    def num_tokens(self, batch: Mapping[str, Tensor]) -> int:
        return count_tokens(batch)

    def tokens_per_sample(self, tokens: int) -> int:
        return tokens

    def _check(self, documents: bool) -> None:
        if documents:
            raise self.refuse("documents", "each sample is one text with one label")


_USUAL_IMAGE_SIZE = 224  # what convolutional networks are trained on, whose configurations name no size


def image_shape(config: Any) -> tuple[int, int, int]:
    """Channels, height and width of the images a model takes; of one for images and text, its part for images."""
    config = getattr(config, "vision_config", config)
    size = getattr(config, "image_size", None) or _USUAL_IMAGE_SIZE
    height, width = (size, size) if isinstance(size, int) else size
    return config.num_channels, height, width


class ImageClassification(Task):
    """Counts samples where text tasks count tokens."""

    name: ClassVar[str] = "image-classification"
    auto_class: ClassVar[str] = "AutoModelForImageClassification"
    modality: ClassVar[Literal["text", "image", "speech"]] = "image"

    def inputs(self, config: Any, *, padding: bool = False, documents: bool = False) -> tuple[Input, ...]:
        self._check(padding, documents)
        return (
            Input("pixel_values", "float", ("batch", *image_shape(config))),
            Input("labels", "int64", ("batch",)),
        )

    def synthetic(
        self, config: Any, *, batch: int, tokens: int, seed: int, padding: bool = False, documents: bool = False
    ) -> Batch:
        self._check(padding, documents)
        generator = torch.Generator().manual_seed(seed)
        return {
            "pixel_values": torch.randn(batch, *image_shape(config), generator=generator),
            "labels": torch.randint(0, num_labels(config), (batch,), generator=generator),
        }

    def collate(self, samples: Sequence[Sample], config: Any, tokens: int) -> Batch:
        return {
            "pixel_values": torch.stack([sample["pixel_values"] for sample in samples]),
            "labels": torch.tensor([sample["labels"] for sample in samples]),
        }

    def num_tokens(self, batch: Mapping[str, Tensor]) -> int:
        return batch["labels"].shape[0]

    def tokens_per_sample(self, tokens: int) -> int:
        return 1

    def _check(self, padding: bool, documents: bool) -> None:
        if padding:
            raise self.refuse("padding", "all images have the size that the model's configuration fixes")
        if documents:
            raise self.refuse("documents", "an image is not a sequence of tokens")
