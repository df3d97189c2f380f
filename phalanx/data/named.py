"""HuggingFace datasets by name: `hf:NAME`, `hf:NAME,CONFIG#SPLIT`, or `hf-stream:` to read as it arrives.

NAME is of the hub or of a folder, whatever `datasets.load_dataset` takes; the package is needed only here.
"""

from __future__ import annotations

from typing import Any

from phalanx.data.sources import Source, dataset_source, require_datasets
from phalanx.errors import DataError

_STREAMS = {"hf": False, "hf-stream": True}


def is_named_dataset(item: str) -> bool:
    return item.partition(":")[0] in _STREAMS and ":" in item


def is_stream(item: str) -> bool:
    """Of a named dataset: whether it is read as it arrives."""
    return _STREAMS[item.partition(":")[0]]


def named_dataset(item: str) -> Source:
    """Its rows, of the split that is named, or of the only one."""
    kind, _, rest = item.partition(":")
    rest, _, split = rest.partition("#")
    name, _, config = rest.partition(",")
    if not name:
        raise DataError(f"data {item!r} names no dataset", "write e.g. hf:roneneldan/TinyStories#train")
    datasets = require_datasets(f"data {item!r} is a HuggingFace dataset")
    try:
        loaded = datasets.load_dataset(name, config or None, split=split or None, streaming=_STREAMS[kind])
    except Exception as error:  # the package raises many kinds, of its own and of what it downloads with
        said = (str(error).strip().splitlines() or [""])[0]
        raise DataError(
            f"data {item!r} cannot be loaded: {type(error).__name__}: {said}",
            "check the name as in datasets.load_dataset; on a machine without a network load it once elsewhere, "
            "save_to_disk and give the folder",
        ) from error
    return dataset_source(_chosen(loaded, item), item)


def _chosen(loaded: Any, item: str) -> Any:
    if not isinstance(loaded, dict):
        return loaded
    if len(loaded) > 1:
        raise DataError(
            f"data {item!r} has the splits {', '.join(map(repr, loaded))}, and one must be chosen",
            f"name it, e.g. {item}#{next(iter(loaded))}",
        )
    return next(iter(loaded.values()))
