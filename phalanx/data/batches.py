"""Any data as batches: the function (seed, stream position) → samples that training is fed by.

`open_data` finds out what the data is and how the task learns from it; `Batches` is all that the rest of Phalanx sees.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch

from phalanx.data.mixture import Mixture, weighted_sources
from phalanx.data.named import is_named_dataset, named_dataset
from phalanx.data.order import Order
from phalanx.data.own import OwnSamples, is_own_dataset, shown
from phalanx.data.samples import Indices, Request, Samples, SyntheticSamples, WindowSamples, is_synthetic, longest
from phalanx.data.sources import NAMED, BrokenData, Source, dataset_source, existing, file_source, is_dataset
from phalanx.data.stream import ARRAY_SUFFIXES, open_array
from phalanx.data.text import kinds_text, text_samples
from phalanx.data.tokenizer import Tokenizer
from phalanx.errors import DataError
from phalanx.tasks.base import Batch, RecordTask, Task, WindowTask
from phalanx.tasks.vocabulary import vocab_size

TEXT_KEY = "text"
USUAL_TOKENS = 1024  # of a sample, where nobody says


class Batches:
    """Samples in the order in which they are visited."""

    def __init__(self, samples: Samples, task: Task, *, tokens: int, seed: int, shuffle: bool) -> None:
        self._samples = samples
        # A stream whose end is not known cannot be permuted; it is visited as it arrives.
        num_samples = samples.num_samples
        self._order = None if num_samples is None else Order(seed, num_samples, shuffle)
        self.tokens_per_sample = task.tokens_per_sample(tokens)
        self.padding = samples.padding
        self.documents = samples.documents
        self.weights = samples.weights if isinstance(samples, MixedSamples) else ()

    @property
    def num_samples(self) -> int | None:
        """Samples per epoch; None for a stream whose end has not been seen."""
        return self._samples.num_samples

    def batch(self, first: int, count: int) -> Batch:
        """The samples at stream positions [first, first + count)."""
        assert first >= 0 and count > 0, f"no samples at [{first}, {first + count})"
        return self.at(np.arange(first, first + count, dtype=np.int64))

    def at(self, positions: Indices) -> Batch:
        """The samples at these stream positions."""
        indices = positions if self._order is None else self._order.at(positions)
        batch = self._samples.rows(indices, positions)
        if self.adds_mask and "input_ids" in batch and "attention_mask" not in batch:
            batch = {**batch, "attention_mask": torch.ones_like(batch["input_ids"])}
        return batch

    @property
    def adds_mask(self) -> bool:
        """Whether rows say that they are full only because those of other data may be padded."""
        return self.padding and not self._samples.padding

    def mask_like(self, other: Batches) -> None:
        """Rows that are full say so where those of other data may be padded."""
        self.padding = self.padding or other.padding

    def describe(self) -> str:
        """What the data is, in one line."""
        parts = [self._samples.description]
        parts += [f"{self.tokens_per_sample:,} tokens per sample"] if self.tokens_per_sample > 1 else []
        parts += [f"{self.num_samples:,} samples per epoch"] if self.num_samples is not None else []
        return ", ".join(parts)


def open_data(
    data: Any,
    *,
    task: Task,
    config: Any,
    tokenizer: Tokenizer | None,
    tokens: int,
    seed: int,
    documents: bool = False,
    shuffle: bool = True,
    on_broken: str = "refuse",
    cache: Path,
    text_key: str = TEXT_KEY,
    collate: Callable[[list[Any]], Mapping[str, Any]] | None = None,
) -> Batches:
    """Batches from a path, a list of paths, 'stdlib', 'synthetic[:NUM]', 'hf:NAME', a `datasets` object or a map-style
    dataset; or from several of them with weights: 'PATH:0.7', or a dict of sources and weights."""
    BrokenData(on_broken)  # refuses an unknown policy even where nothing can be broken
    task.inputs(config, documents=documents)
    request = Request(task, config, tokenizer, tokens, seed, documents, on_broken, cache, text_key)

    def opened(source: Any) -> Batches:
        if not is_own_dataset(source):  # whose samples are as long as they are
            check_length(task, config, tokens)
        own = collate if is_own_dataset(source) or mixed is None else None
        return Batches(_samples(source, request, own), task, tokens=tokens, seed=seed, shuffle=shuffle)

    mixed = weighted_sources(data)
    if mixed is None:
        return opened(data)
    if collate is not None and not any(is_own_dataset(source) for source, _ in mixed):
        raise DataError("collate was given, but none of the sources of data is your own dataset", "leave collate out")
    samples = MixedSamples([(opened(source), share) for source, share in mixed])
    return Batches(samples, task, tokens=tokens, seed=seed, shuffle=False)


class MixedSamples(Samples):
    """Samples of several sources in fixed shares. An epoch has as many samples as all of them together."""

    def __init__(self, parts: Sequence[tuple[Batches, Fraction]]) -> None:
        self._parts = [batches for batches, _ in parts]
        self._shapes: dict[str, list[int]] | None = None  # of a sample's inputs, once one was seen
        self._mixture = Mixture([share for _, share in parts])
        self.weights = tuple(str(share) for _, share in parts)
        for part in self._parts:
            for other in self._parts:
                part.mask_like(other)
        self.padding = any(part.padding for part in self._parts)
        self.documents = any(part.documents for part in self._parts)
        self.description = "mixed: " + "; ".join(f"{float(share):.3g} of {part.describe()}" for part, share in parts)

    @property
    def num_samples(self) -> int | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        sizes = [part.num_samples for part in self._parts]
        return None if None in sizes else sum(size or 0 for size in sizes)

    def rows(self, indices: Indices, positions: Indices) -> Batch:
        sources, own = self._mixture.at(positions)
        found = [(np.flatnonzero(sources == number), part) for number, part in enumerate(self._parts)]
        places = [place for place, _ in found if len(place)]
        batches = [self._alike(part.at(own[place]), part) for place, part in found if len(place)]
        back = torch.from_numpy(np.argsort(np.concatenate(places)))
        return {name: torch.cat([batch[name] for batch in batches])[back] for name in batches[0]}

    def _alike(self, batch: Batch, part: Batches) -> Batch:
        """Checked: samples of all sources have the same inputs of the same sizes."""
        shapes = {name: list(tensor.shape[1:]) for name, tensor in sorted(batch.items())}
        self._shapes = self._shapes or shapes
        if shapes != self._shapes:
            raise DataError(
                f"samples of {part.describe()} are {shapes}, and those of another source {self._shapes}",
                "mix sources whose samples have the same inputs of the same sizes",
            )
        return batch


def sample_length(asked: int | None, task: Task, config: Any) -> int:
    """Tokens per sample: as asked for, else a usual number, less where the model takes less."""
    _, limit = longest(task, config)
    return asked or min(USUAL_TOKENS, limit or USUAL_TOKENS)


def needs_tokenizer(data: Any, task: Task) -> bool:
    """Whether opening this data for this task will tokenise text."""
    mixed = weighted_sources(data)
    if mixed is not None:
        return any(needs_tokenizer(source, task) for source, _ in mixed)
    items = _items(data)
    if items is None:
        return is_dataset(data)
    named = is_synthetic(items[0]) or task.modality == "image"
    return not named and Path(items[0]).suffix.lower() not in ARRAY_SUFFIXES


def _samples(data: Any, request: Request, collate: Callable[[list[Any]], Mapping[str, Any]] | None) -> Samples:
    items = _items(data)
    if items is None and not is_dataset(data):
        return OwnSamples(data, collate, request)
    if collate is not None:
        raise DataError(f"collate was given, but data is not your own dataset: {shown(data)}", "leave collate out")
    if items is None:
        return _text(dataset_source(data), request)
    if any(is_synthetic(item) for item in items):
        return SyntheticSamples(_only(items, "synthetic data", request), request)
    if request.task.modality != "text":
        return _folder(_only(items, f"data for task {request.task.name}", request), request)
    if any(Path(item).suffix.lower() in ARRAY_SUFFIXES for item in items):
        return _array(existing(_only(items, "a pre-tokenised array", request)), request)
    if any(is_named_dataset(item) for item in items):
        return _text(named_dataset(_alone(items, "a named dataset")), request)
    if "stdlib" in items:
        _require_learns_from_text(request.task)
    return _text(file_source(items, request.text_key), request)


def _require_learns_from_text(task: Task) -> None:
    kinds = task.kinds if isinstance(task, RecordTask) else ()
    if not isinstance(task, WindowTask) and {"text"} not in map(set, kinds):
        raise DataError(
            f"data 'stdlib' is text alone, and task {task.name} learns from records with {kinds_text(kinds)}",
            "give JSONL records, or 'synthetic'",
        )


def _items(data: Any) -> list[str] | None:
    """Names and paths, or None if the data is an object of its own."""
    if isinstance(data, str | Path):
        return [str(data)]
    if is_dataset(data) or is_own_dataset(data):
        return None
    if isinstance(data, Sequence) and data and all(isinstance(item, str | Path) for item in data):
        return [str(item) for item in data]
    raise DataError(
        f"data is a {type(data).__name__}, which cannot be read",
        f"give a path, a list of paths, {', '.join(map(repr, NAMED))}, or a dataset with __len__ and __getitem__",
    )


def _only(items: list[str], what: str, request: Request) -> str:
    """The one item of data that is not text."""
    if request.text_key != TEXT_KEY:
        raise DataError(f"option text_key = {request.text_key!r} does nothing with {what}", "leave text_key out")
    return _alone(items, what)


def _alone(items: list[str], what: str) -> str:
    if len(items) > 1:
        raise DataError(
            f"{what} cannot be joined with other data: {', '.join(items)}",
            f"give it alone, or mix it: every source with a weight, e.g. {items[0]}:0.5",
        )
    return items[0]


def _text(source: Source, request: Request) -> Samples:
    return text_samples(source, request, _tokenizer(request, source.name))


def _array(path: Path, request: Request) -> Samples:
    if not isinstance(request.task, WindowTask):
        kinds = request.task.kinds if isinstance(request.task, RecordTask) else ()
        raise DataError(
            f"task {request.task.name} cannot learn from the token array {path}",
            f"give JSONL records with {kinds_text(kinds)}",
        )
    if request.documents:
        raise DataError(f"{path} does not say where documents end", "give text, or leave documents out")
    stream = open_array(path, vocab_size=vocab_size(request.config), tokens=request.tokens)
    return WindowSamples(stream, request, str(path))


def _folder(item: str, request: Request) -> Samples:
    if is_named_dataset(item):
        raise DataError(
            f"data {item!r} is a HuggingFace dataset, of which only text is read, and task {request.task.name} learns "
            f"from {request.task.modality}",
            "give a folder of files",
        )
    path = Path(item) if item == "stdlib" else existing(item)
    if not path.is_dir():
        raise DataError(f"{path} is not a folder", f"task {request.task.name} learns from a folder; give one")
    if request.task.modality == "image":
        from phalanx.data.media import image_samples

        return image_samples(path, request)
    from phalanx.data.media import speech_samples

    return speech_samples(path, request, _tokenizer(request, str(path)))


def _tokenizer(request: Request, name: str) -> Tokenizer:
    if request.tokenizer is None:
        raise DataError(f"{name} is text, and no tokenizer was given", "load one, e.g. load_tokenizer('bytes', …)")
    return request.tokenizer


def check_length(task: Task, config: Any, tokens: int, option: str = "seq_len") -> None:
    """Raises a DataError for samples that the model cannot take. option: what sets their length."""
    if task.modality == "image":
        return
    if tokens < 2:
        raise DataError(f"a sample of {tokens} token has nothing to predict", "give a sample at least 2 tokens")
    name, limit = longest(task, config)
    if limit is not None and tokens > limit:
        raise DataError(
            f"a sample of {tokens} tokens is longer than the model takes ({name} allows {limit})",
            f"set {option} to {limit} or less",
        )
