"""What a model takes of the data: token ids and labels that it has rows for, and so many tokens in a sample.

Checked batch by batch by smallest and largest value, because a model that gets others fails deep inside, and on a GPU
without saying why.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from phalanx.errors import DataError
from phalanx.tasks.base import IGNORE, Batch, Task
from phalanx.tasks.custom import Custom
from phalanx.tasks.vocabulary import most_positions, num_token_ids


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
