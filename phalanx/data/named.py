"""HuggingFace datasets by name: `hf:NAME`, `hf:NAME,CONFIG#SPLIT`, or `hf-stream:` to read as it arrives.

NAME is of the hub or of a folder, whatever `datasets.load_dataset` takes; the package is needed only here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from phalanx.data.sources import Source, dataset_source, existing, explained, is_saved_dataset, require_datasets
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
    found = _found(name, split, item)
    advice = (
        "check the name as in datasets.load_dataset; on a machine without a network load it once elsewhere, "
        "save_to_disk and give the folder without hf:"
    )
    with explained(f"data {item!r} cannot be loaded", advice):
        loaded = datasets.load_dataset(found, config or None, split=split or None, streaming=_STREAMS[kind])
    return dataset_source(_chosen(loaded, item), item)


def _found(name: str, split: str, item: str) -> str:
    """A name of the hub as it is; a path, if it is one that load_dataset reads as it was meant."""
    is_path = name[0] in "./~"
    path = existing(name).absolute() if is_path else Path(name)
    if path.is_file() and (is_path or path.suffix):
        raise DataError(f"data {item!r} is a file", f"give its folder, e.g. hf:{path.parent}")
    if is_saved_dataset(path):  # whose splits load_dataset may join
        folder = path / split if (path / split).is_dir() else path
        raise DataError(f"data {item!r} was written by save_to_disk", f"give the folder without hf:, e.g. {folder}")
    return str(path) if is_path else name


def _chosen(loaded: Any, item: str) -> Any:
    if not isinstance(loaded, dict):
        return loaded
    if len(loaded) > 1:
        raise DataError(
            f"data {item!r} has the splits {', '.join(map(repr, loaded))}, and one must be chosen",
            f"name it, e.g. {item}#{next(iter(loaded))}",
        )
    return next(iter(loaded.values()))
