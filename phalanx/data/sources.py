"""Where text comes from: files, folders, Python's standard library, HuggingFace datasets; read as records.

Records are read one after the other, never a whole corpus at once. Each is what one sample or document is made from and
knows the place it came from. What cannot be read is reported to one `BrokenData`, which refuses or skips it, as the
user chose, and counts it. What becomes of records is the business of others.
"""

from __future__ import annotations

import difflib
import hashlib
import itertools
import json
import sysconfig
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from phalanx.errors import ConfigError, DataError, nearest
from phalanx.records import read_json

POLICIES = ("refuse", "skip")


class BrokenData:
    """Collects what was broken during one pass over a source."""

    def __init__(self, policy: str, at_once: bool = False) -> None:
        if policy not in POLICIES:
            raise ConfigError(f"on_broken is {policy!r}", nearest(policy, POLICIES))
        self.policy = policy
        self._at_once = at_once  # a pass that may never end cannot wait with its warning
        self.skipped: list[str] = []

    def report(self, place: str, reason: str) -> None:
        """Refuse with an error, or take note of what is skipped."""
        if self.policy == "refuse":
            raise DataError(f"{place}: {reason}", "repair or remove it, or set on_broken=skip to leave it out")
        self.skipped.append(f"{place}: {reason}")
        if self._at_once:
            warnings.warn(f"skipped broken part {len(self.skipped)}: {self.skipped[-1]}", stacklevel=2)


def warn_skipped(skipped: list[str], source: str) -> None:
    """Say how much was left out, naming the first few."""
    if skipped:
        shown = "; ".join(skipped[:3]) + ("; …" if len(skipped) > 3 else "")
        parts = "part" if len(skipped) == 1 else "parts"
        warnings.warn(f"skipped {len(skipped)} broken {parts} of {source}: {shown}", stacklevel=3)


TEXT_SUFFIXES = (".txt", ".md", ".py", ".rst")
RECORD_SUFFIXES = (".jsonl", ".json")

# Long texts are handed on in pieces of about this many characters, cut at line ends.
_PIECE = 1 << 20


@dataclass(frozen=True)
class Record:
    """Named fields of one sample. A long text comes as several records, of which only the last `ends` it."""

    place: str
    fields: Mapping[str, Any]
    ends: bool = True


def read_file(path: Path, broken: BrokenData, text_key: str = "text") -> Iterator[Record]:
    """The records of one file; a file that is neither JSON nor JSONL is one text, in the field `text_key`."""
    try:
        match path.suffix.lower():
            case ".jsonl":
                yield from _read_jsonl(path, broken)
            case ".json":
                yield from _read_json(path, broken)
            case _:
                yield from _read_text(path, broken, text_key)
    except OSError as error:
        broken.report(str(path), f"cannot be read ({error.strerror or error})")


def _read_text(path: Path, broken: BrokenData, text_key: str) -> Iterator[Record]:
    # Checked before anything is handed on, so that a skipped file leaves no half of itself behind.
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if (reason := _utf8_reason(line)) is not None:
                return broken.report(f"{path}:{number}", reason)
    with path.open(encoding="utf-8-sig", newline="") as file:
        piece = _read_piece(file)
        while piece:
            following = _read_piece(file)
            yield Record(str(path), {text_key: piece}, ends=not following)
            piece = following


def _read_piece(file: Any) -> str:
    piece = file.read(_PIECE)
    return piece if piece.endswith("\n") else piece + file.readline()


def _read_jsonl(path: Path, broken: BrokenData) -> Iterator[Record]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            place = f"{path}:{number}"
            if not line.strip():
                continue
            if (reason := _utf8_reason(line)) is not None:
                broken.report(place, reason)
                continue
            try:
                value = read_json(line.decode("utf-8-sig"))
            except ValueError as error:
                broken.report(place, f"is not JSON ({error})")
                continue
            if (reason := _record_reason(value)) is not None:
                broken.report(place, reason)
            else:
                yield Record(place, value)


def _read_json(path: Path, broken: BrokenData) -> Iterator[Record]:
    try:
        value = read_json(path.read_text(encoding="utf-8-sig"))
    except UnicodeDecodeError:
        return broken.report(str(path), "is not valid UTF-8")
    except ValueError as error:
        return broken.report(str(path), f"is not JSON ({error})")
    for number, item in enumerate(value if isinstance(value, list) else [value], 1):
        if (reason := _record_reason(item)) is not None:
            broken.report(f"{path}, record {number}", reason)
        else:
            yield Record(f"{path}, record {number}", item)


def _record_reason(value: Any) -> str | None:
    if not isinstance(value, dict):
        return "is not a JSON object"
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        return "holds half of a surrogate pair, which is no character"
    return None


def is_utf8(path: Path) -> bool:
    """Whether a file can be read and is text in UTF-8."""
    try:
        return _utf8_reason(path.read_bytes()) is None
    except OSError:
        return False


def _utf8_reason(line: bytes) -> str | None:
    try:
        line.decode("utf-8")
    except UnicodeDecodeError as error:
        return f"is not valid UTF-8 (byte {line[error.start]:#04x})"
    return None


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
    if len(items) == 1 and items[0] != "stdlib" and is_saved_dataset(folder := existing(items[0])):
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
        rows = iter(dataset)
        for number in itertools.count():
            with explained(f"{name} cannot be read after {number} rows", "repair the data, or check the network"):
                row = next(rows, None)
            if row is None:
                return
            yield Record(f"{name}, row {number}", _given(row))

    return Source(name, getattr(dataset, "_fingerprint", None) if hasattr(dataset, "__len__") else None, read)


def _given(value: Any) -> Any:
    """Without fields that are None, however deep: a dataset's row names every field that some row has."""
    if isinstance(value, Mapping):
        return {name: _given(field) for name, field in cast(Mapping[str, Any], value).items() if field is not None}
    return [_given(item) for item in cast(list[Any], value)] if isinstance(value, list) else value


def existing(item: str) -> Path:
    """The path, if something is there."""
    if not item:  # to a file system, this folder
        raise DataError("data '' names nothing", f"give a file or folder, or one of {', '.join(NAMED)}")
    path = Path(item).expanduser()
    try:
        if path.exists():
            return path
        reason = "does not exist"
    except OSError as error:
        reason = f"cannot be read ({error.strerror or error})"
    close = difflib.get_close_matches(item, NAMED, cutoff=0.7)
    meant = f"did you mean {close[0]!r}? " if close else ""
    raise DataError(
        f"data {item!r} {reason} (seen from {Path.cwd()})",
        f"{meant}Give a file or folder that exists, or one of the named sources {', '.join(NAMED)}",
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
    found = sorted(file for file in path.rglob("*") if file.suffix.lower() in suffixes and is_visible(file, path))
    if not found:
        raise DataError(f"folder {path} holds no text", f"put files there that end in {', '.join(suffixes)}")
    return found


def is_visible(file: Path, root: Path) -> bool:
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


def is_saved_dataset(folder: Path) -> bool:
    """Whether `save_to_disk` wrote this folder, of a dataset or of its splits."""
    return (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file()


def _load_dataset(folder: Path) -> Any:
    datasets = require_datasets(f"{folder} is a saved HuggingFace dataset")
    with explained(f"the saved HuggingFace dataset {folder} cannot be loaded", "save it anew with save_to_disk"):
        return datasets.load_from_disk(str(folder))


@contextmanager
def explained(what: str, advice: str) -> Iterator[None]:
    """What the package `datasets` raises, many kinds of its own and of what it reads with, as an error of the data."""
    try:
        yield
    except Exception as error:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        because = "" if cause is error else f" ({_first_line(cause)})"
        raise DataError(f"{what}: {_first_line(error)}{because}", advice) from error


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"


def require_datasets(why: str) -> Any:
    """The package `datasets`."""
    try:
        import datasets  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        if getattr(error, "name", None) != "datasets":
            raise DataError(
                f"{why}, and the package 'datasets' that reads it cannot be imported: {error}",
                "repair its installation (pip install --force-reinstall datasets), or give the data as JSONL",
            ) from error
        raise DataError(
            f"{why}, and the package 'datasets' that reads it is not installed",
            "pip install datasets, or give the data as JSONL",
        ) from None
    return datasets
