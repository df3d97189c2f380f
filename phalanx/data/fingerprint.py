"""Which data it is, told without reading it: the names, sizes and times of its files; of a HuggingFace dataset by name
what the package `datasets` says of it.

Files that were copied with their times, or whose folder was moved, are the same data still. It imports no torch.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Sequence
from pathlib import Path

from phalanx.data.mixture import split_weight
from phalanx.data.named import is_named_dataset, is_stream, named_dataset
from phalanx.data.sources import NAMED, existing, is_visible

File = tuple[str, int, int]  # name, bytes, when it was changed, in nanoseconds


def fingerprint(data: Sequence[str]) -> str | None:
    """Of paths and named sources, each with or without a weight. None of what can be known only by reading it: streams,
    and datasets that do not say what they are."""
    parts = [(split_weight(item)[1], _facts(split_weight(item)[0])) for item in data]
    if any(facts is None for _, facts in parts):
        return None
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def place(data: Sequence[str]) -> str:
    """Where it lies, whatever folder it is named from."""
    return " + ".join(item if _is_named(item) else str(Path(item).expanduser().absolute()) for item in data)


def _is_named(item: str) -> bool:
    return item.partition(":")[0] in NAMED or is_named_dataset(item)


def _facts(item: str) -> list[File] | str | None:
    if is_named_dataset(item):
        identity = None if is_stream(item) else named_dataset(item).identity
        return None if identity is None else f"dataset {identity}"
    if _is_named(item):
        return f"{item} of Python {platform.python_version()}" if item == "stdlib" else item
    path = existing(item)
    if path.is_file():
        return [_file(path, path.name)]
    found = sorted(file for file in path.rglob("*") if is_visible(file, path))
    return [_file(file, file.relative_to(path).as_posix()) for file in found]


def _file(path: Path, name: str) -> File:
    try:
        seen = path.stat()
    except OSError:  # said when it is read
        return name, -1, -1
    return name, seen.st_size, seen.st_mtime_ns
