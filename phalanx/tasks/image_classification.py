"""Image classification: one label per image of the size the model was made for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from phalanx.tasks.base import Batch, Input, Sample, Task
from phalanx.tasks.vocabulary import num_labels


def image_shape(config: Any) -> tuple[int, int, int]:
    """Channels, height and width of the images a model takes."""
    size = config.image_size
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
