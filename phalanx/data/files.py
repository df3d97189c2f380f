"""Reading text and JSON files as records, one after the other and never a whole corpus at once.

A record is what one sample or document is made from; it knows the place it came from, so that every complaint can
name it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.data.broken import BrokenData

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
                value = json.loads(line.decode("utf-8-sig"))
            except ValueError as error:
                broken.report(place, f"is not JSON ({error})")
                continue
            if (reason := _record_reason(value)) is not None:
                broken.report(place, reason)
            else:
                yield Record(place, value)


def _read_json(path: Path, broken: BrokenData) -> Iterator[Record]:
    try:
        value = json.loads(path.read_text(encoding="utf-8-sig"))
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
