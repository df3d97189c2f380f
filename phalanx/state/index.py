"""A checkpoint's index: what each tensor is and which file holds which box of it, and the counters beside the tensors.

An index may be damaged or hostile: it is read into records of checked shape, its boxes must cover their tensors exactly
once, and the files it names must lie in its folder.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from phalanx.errors import CheckpointError
from phalanx.records import Malformed, read_record
from phalanx.state.folders import STATE_FILE, Count, is_inside
from phalanx.state.layout import Box, check_tiles

FORMAT = 2
"""1: each tensor whole in one file. 2: each tensor as boxes in any number of files."""


@dataclass(frozen=True)
class StoredPiece:
    """One box of a tensor, and the file that holds it."""

    file: str
    box: Box


@dataclass(frozen=True)
class StoredTensor:
    """A tensor and the pieces that make it up, without overlap."""

    shape: tuple[int, ...]
    dtype: str
    pieces: tuple[StoredPiece, ...]

    def to_json(self) -> dict[str, Any]:
        pieces = [{"file": piece.file, "offset": piece.box.offset, "shape": piece.box.shape} for piece in self.pieces]
        return {"shape": self.shape, "dtype": self.dtype, "pieces": pieces}


Shape = tuple[Count, ...]
Dtype = Literal[
    "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int64", "int32", "int16", "int8",
    "uint8", "bool",
]  # fmt: skip


@dataclass(frozen=True)
class _PieceEntry:
    file: str
    offset: Shape
    shape: Shape


@dataclass(frozen=True)
class _TensorEntry:
    """An entry of any format so far."""

    shape: Shape
    dtype: Dtype
    pieces: list[_PieceEntry] | None = None
    file: str | None = None

    def stored(self) -> StoredTensor:
        if self.pieces is None:
            return StoredTensor(self.shape, self.dtype, (StoredPiece(self.file or "", Box.whole(self.shape)),))
        pieces = tuple(StoredPiece(piece.file, Box(piece.offset, piece.shape)) for piece in self.pieces)
        return StoredTensor(self.shape, self.dtype, pieces)


@dataclass(frozen=True)
class Record:
    """What a checkpoint says of itself, as it is stored."""

    format: int
    step: Count
    state: dict[str, Any]
    tensors: dict[str, _TensorEntry]


@dataclass(frozen=True)
class RankRecord:
    """What one rank says of its part of a checkpoint that is being written."""

    files: list[dict[str, Any]]
    state: dict[str, Any]
    tensors: dict[str, _TensorEntry]


@dataclass(frozen=True)
class _Head:
    format: int


class NewerFormat(CheckpointError):
    """A checkpoint that is not damaged, but not for this version to read."""


def read_index(path: Path) -> tuple[Record, dict[str, StoredTensor]]:
    """What a checkpoint says of itself and of its tensors. Raises Malformed where that cannot be."""
    text = (path / STATE_FILE).read_bytes()
    if (found := read_record(_Head, text).format) > FORMAT:
        raise NewerFormat(
            f"the checkpoint {path} has format {found}; this version reads formats up to {FORMAT}",
            "resume with the version of Phalanx that wrote it, or a newer one",
        )
    record = read_record(Record, text)
    try:
        tensors = {name: entry.stored() for name, entry in record.tensors.items()}
        for name, stored in tensors.items():
            check_tiles(name, stored.shape, [piece.box for piece in stored.pieces])
    except (AssertionError, ValueError) as error:
        raise Malformed(str(error)) from None
    if outside := [p.file for stored in tensors.values() for p in stored.pieces if not is_inside(p.file)]:
        raise Malformed(f"it names {outside[0]!r}, which is not a file of this folder")
    return record, tensors


def piece_key(name: str, shape: tuple[int, ...], box: Box) -> str:
    """What a box is called in its file: the tensor's own name when it is all of it, else `name[0:4, 2:6]`."""
    if box == Box.whole(shape):
        return name
    return f"{name}[{', '.join(f'{a}:{b}' for a, b in zip(box.offset, box.end, strict=True))}]"
