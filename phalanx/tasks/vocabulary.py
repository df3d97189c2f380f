"""What tasks read from a HuggingFace configuration: vocabulary size, special ids, label counts.

Multimodal configurations keep these in a nested text configuration; nobody else needs to know.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from phalanx.errors import ModelError
from phalanx.tasks.base import IGNORE, BrokenRecord

# These count positions from the one after the padding id, so that the table's first rows are never read.
_POSITIONS_AFTER_PADDING = frozenset((
    "camembert", "data2vec-text", "esm", "ibert", "layoutlmv3", "lilt", "longformer", "luke", "markuplm", "mpnet",
    "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod",
))  # fmt: skip


def text_config(config: Any) -> Any:
    """The part of a configuration that describes its text model."""
    nested = getattr(config, "get_text_config", None)
    return nested() if nested is not None else config


def vocab_size(config: Any) -> int:
    size = getattr(text_config(config), "vocab_size", None)
    if size is None:
        raise ModelError(
            f"{type(config).__name__} has no vocab_size, so the model reads no text",
            "choose a task that fits the model, e.g. task=image-classification",
        )
    return size


def num_token_ids(config: Any, name: str) -> int | None:
    """How many token ids there are for an input of this name, where the configuration says so; a few translators have
    one vocabulary for what they read and another for what they write."""
    text = text_config(config)
    own = getattr(text, "src_vocab_size" if name == "input_ids" else "decoder_vocab_size", None)
    return own or getattr(text, "vocab_size", None)


def most_positions(config: Any, name: str = "max_position_embeddings") -> int | None:
    """How many tokens the model takes, where its configuration says so under this name."""
    text = text_config(config)
    rows = getattr(text, name, None)
    if rows is None or getattr(text, "model_type", None) not in _POSITIONS_AFTER_PADDING:
        return rows
    return rows - pad_id(config) - 1


def pad_id(config: Any) -> int:
    """The id that fills rows behind their end. Any id does where the model names none: it is masked everywhere."""
    pad = getattr(text_config(config), "pad_token_id", None)
    return pad if pad is not None and 0 <= pad < vocab_size(config) else 0


def random_ids(config: Any, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Random token ids without the padding id, from which some models derive positions or lengths."""
    size = vocab_size(config)
    ids = torch.randint(0, size, shape, generator=generator)
    pad = getattr(text_config(config), "pad_token_id", None)
    return ids if pad is None else torch.where(ids == pad, (pad + 1) % size, ids)


# Models whose decoder begins with the last token of the target, which names its language.
_LAST_TOKEN_FIRST = ("mbart", "plbart")
# What others call the token that it begins with.
_START = {"t5gemma": "bos_token_id"}


def shift_right(labels: Tensor, config: Any) -> Tensor:
    """What the decoder reads to predict `labels`, exactly as HuggingFace derives it."""
    pad = _required_id(config, "pad_token_id")
    family = getattr(config, "model_type", "")
    if family in _LAST_TOKEN_FIRST:
        shown = labels.masked_fill(labels == IGNORE, pad)
        last = ((shown != pad).sum(1, keepdim=True) - 1).clamp(min=0)
        return torch.cat([shown.gather(1, last), shown[:, :-1]], dim=1)
    start = _required_id(config, _START.get(family, "decoder_start_token_id"))
    shifted = torch.full_like(labels, start)
    shifted[:, 1:] = labels[:, :-1]
    return shifted.masked_fill(shifted == IGNORE, pad)


def num_labels(config: Any) -> int:
    count = config.num_labels
    if count < 2:
        raise ModelError(
            f"classification needs at least two labels, but {type(config).__name__}.num_labels is {count}",
            "set the option model_options num_labels=…, or num_labels in the model's configuration",
        )
    return count


def label_index(label: Any, config: Any) -> int:
    """A record's label, given as number or as name, as the model's class."""
    names: Mapping[str, int] = getattr(config, "label2id", None) or {}
    count = num_labels(config)
    if isinstance(label, str) and label in names:
        return int(names[label])
    if isinstance(label, int) and not isinstance(label, bool) and 0 <= label < count:
        return label
    raise BrokenRecord(f"label {label!r} is neither a number in 0 … {count - 1} nor one of {', '.join(names)}")


def _required_id(config: Any, name: str) -> int:
    value = getattr(text_config(config), name, None)
    if value is None or not 0 <= value < vocab_size(config):
        raise ModelError(
            f"{type(config).__name__}.{name} is {value}, but an encoder-decoder model needs a token id "
            f"in 0 … {vocab_size(config) - 1}",
            f"set {name} in the model's configuration",
        )
    return value
