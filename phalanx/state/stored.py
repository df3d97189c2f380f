"""How a checkpoint's index describes tensors: what each is, and which file holds which box of it.

Only the description; files are `shards`' work and folders are `folders`'.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from phalanx.state.layout import Box

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

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> StoredTensor:
        """Reads an entry of any format so far."""
        shape = tuple(entry["shape"])
        if "file" in entry:
            return cls(shape, entry["dtype"], (StoredPiece(entry["file"], Box.whole(shape)),))
        pieces = (
            StoredPiece(piece["file"], Box(tuple(piece["offset"]), tuple(piece["shape"]))) for piece in entry["pieces"]
        )
        return cls(shape, entry["dtype"], tuple(pieces))


def piece_key(name: str, shape: tuple[int, ...], box: Box) -> str:
    """What a box is called in its file: the tensor's own name when it is all of it, else `name[0:4, 2:6]`."""
    if box == Box.whole(shape):
        return name
    return f"{name}[{', '.join(f'{a}:{b}' for a, b in zip(box.offset, box.end, strict=True))}]"
