"""Where text comes from: files, folders, Python's standard library, HuggingFace datasets.

A source is found and named here and read as records; what becomes of the records is the business of others.
"""

from __future__ import annotations

import hashlib
import json
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.data.broken import BrokenData
from phalanx.data.files import RECORD_SUFFIXES, TEXT_SUFFIXES, Record, is_utf8, read_file
from phalanx.errors import DataError, nearest

NAMED = ("stdlib", "synthetic")

_STDLIB_BYTES = 8 << 20
_STDLIB_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}


@dataclass(frozen=True)
class Source:
    """Records that can be read. `identity` is None for a stream that can be read only once, in the order it arrives."""

    name: str
    identity: str | None
    read: Callable[[BrokenData], Iterator[Record]]


def file_source(items: Sequence[str], text_key: str) -> Source:
    """Files and folders, one after the other; 'stdlib' stands for the standard library's own."""
    if len(items) == 1 and items[0] != "stdlib" and _is_saved_dataset(folder := existing(items[0])):
        return dataset_source(_load_dataset(folder), str(folder))
    files = [file for item in items for file in _files(item)]

    def read(broken: BrokenData) -> Iterator[Record]:
        for file in files:
            yield from read_file(file, broken, text_key)

    plural = "file" if len(files) == 1 else "files"
    return Source(f"{', '.join(map(str, items))} ({len(files)} {plural})", _identity(files), read)


def is_dataset(data: Any) -> bool:
    """Whether this object comes from HuggingFace `datasets`; says so without importing it."""
    return type(data).__module__.split(".")[0] == "datasets"


def dataset_source(dataset: Any, name: str | None = None) -> Source:
    """The rows of a HuggingFace dataset. One without a length is a stream."""
    if isinstance(dataset, dict):
        first = next(iter(dataset), "train")
        raise DataError(
            f"{name or 'the dataset'} holds the splits {', '.join(map(repr, dataset))}, and one must be chosen",
            f"give one of them, e.g. {name}/{first}" if name else f"give one of them, e.g. dataset[{first!r}]",
        )
    name = name or f"{type(dataset).__name__} object"

    def read(broken: BrokenData) -> Iterator[Record]:
        for number, row in enumerate(dataset):
            yield Record(f"{name}, row {number}", row)

    return Source(name, getattr(dataset, "_fingerprint", None) if hasattr(dataset, "__len__") else None, read)


def existing(item: str) -> Path:
    """The path, if something is there."""
    path = Path(item).expanduser()
    try:
        if path.exists():
            return path
        reason = "does not exist"
    except OSError as error:
        reason = f"cannot be read ({error.strerror or error})"
    raise DataError(
        f"data {item!r} {reason}", f"give a file or folder that exists, or a named source: {nearest(item, NAMED)}"
    )


def stdlib_files() -> list[Path]:
    """Sources of Python's standard library in the order of their names, about 8 MB of them."""
    root = Path(sysconfig.get_paths()["stdlib"])
    chosen: list[Path] = []
    size = 0
    for file in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix()):
        if size >= _STDLIB_BYTES:
            break
        # A file that is not UTF-8 is left out rather than reported: nobody can repair the standard library.
        if not _STDLIB_LEFT_OUT.intersection(file.relative_to(root).parts) and is_utf8(file):
            chosen.append(file)
            size += file.stat().st_size
    if not chosen:
        raise DataError(f"Python's standard library in {root} has no source files", "give a file or a folder of text")
    return chosen


def _files(item: str) -> list[Path]:
    if item == "stdlib":
        return stdlib_files()
    path = existing(item)
    if path.is_file():
        return [path]
    suffixes = (*TEXT_SUFFIXES, *RECORD_SUFFIXES)
    found = sorted(file for file in path.rglob("*") if file.suffix.lower() in suffixes and _is_visible(file, path))
    if not found:
        raise DataError(f"folder {path} holds no text", f"put files there that end in {', '.join(suffixes)}")
    return found


def _is_visible(file: Path, root: Path) -> bool:
    # A dangling link stays in, to be reported as broken rather than overlooked.
    return not file.is_dir() and not any(part.startswith(".") for part in file.relative_to(root).parts)


def _identity(files: Sequence[Path]) -> str:
    facts: list[tuple[str, int, int]] = []
    for file in files:
        try:
            facts.append((str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns))
        except OSError:
            facts.append((str(file), -1, -1))
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _is_saved_dataset(folder: Path) -> bool:
    return (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file()


def _load_dataset(folder: Path) -> Any:
    try:
        import datasets  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise DataError(
            f"{folder} is a saved HuggingFace dataset, and the package 'datasets' that reads it is not installed",
            "pip install datasets, or give the data as JSONL",
        ) from None
    return datasets.load_from_disk(str(folder))
