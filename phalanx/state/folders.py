"""The folders that checkpoints live in: their names, when one is complete, which are kept, how one takes its place, and
how a checkpoint's index describes its tensors: what each is, and which file holds which box of it.

A checkpoint appears whole or not at all, and one that was complete stays complete until a newer one is. What the
tensors mean is not known here; the files that hold them are `tensor_files`' work.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.errors import ConfigError
from phalanx.state.layout import Box

if TYPE_CHECKING:
    from phalanx.state.tensor_files import WrittenFile

MARKER = "COMPLETE"
STATE_FILE = "state.json"
FORMAT = 2
"""1: each tensor whole in one file. 2: each tensor as boxes in any number of files."""

# A name that starts with a dot is never a checkpoint, except one set aside while another takes its place.
_WRITING, _REPLACED, _DELETED = ".writing", ".replaced", ".deleted"


def final_folder(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08}"


def partial_folder(folder: Path, step: int) -> Path:
    """Where a checkpoint is written before it is complete."""
    return folder / f".{final_folder(folder, step).name}{_WRITING}"


def find(folder: Path) -> list[Path]:
    """Complete checkpoints, newest first. Looks at markers and file sizes, not at contents."""
    complete: dict[int, Path] = {}
    for path in [*folder.glob("step-*"), *folder.glob(f".step-*{_REPLACED}")]:
        step = _step(path)
        if step is not None and fault(path, contents=False) is None:
            complete.setdefault(step, path)
    return [complete[step] for step in sorted(complete, reverse=True)]


def latest(folder: Path) -> Path | None:
    """The newest complete checkpoint, or None."""
    return next(iter(find(folder)), None)


def refuse_used(run: Path) -> None:
    """A run that begins may not write among the checkpoints of another."""
    if there := latest(run / "checkpoints"):
        raise ConfigError(
            f"the run folder {run} already holds checkpoints, the newest {there.name}",
            "continue it with resume=auto (--resume auto), or choose another folder (--out)",
        )


def begin(folder: Path, step: int) -> Path:
    """Clears what an interrupted save left and makes the folder to write into."""
    folder.mkdir(parents=True, exist_ok=True)
    _tidy(folder)
    partial = partial_folder(folder, step)
    partial.mkdir()
    return partial


def mark_complete(partial: Path, files: Iterable[WrittenFile], record: dict[str, Any]) -> None:
    """Writes what the checkpoint says of itself and, last, the marker with every file's size and checksum."""
    from phalanx.state.tensor_files import checksum, sync_folder

    state = partial / STATE_FILE
    write_json(state, record)
    entries = {file.name: {"size": file.size, "start": file.start, "sha256": file.sha256} for file in files}
    entries[state.name] = {"size": state.stat().st_size, "start": 0, "sha256": checksum(state)}
    write_json(partial / MARKER, {"files": entries})
    sync_folder(partial)


def put_in_place(partial: Path, final: Path, keep: int) -> None:
    """Renames a finished folder to its name and prunes to the `keep` newest.

    One already there steps aside first and is found there if we die.
    """
    from phalanx.state.tensor_files import sync_folder

    aside = final.parent / f".{final.name}{_REPLACED}"
    if final.exists():
        os.rename(final, aside)
    os.rename(partial, final)
    sync_folder(final.parent)
    _remove(aside)
    for path in find(final.parent)[keep:]:
        _remove(path)


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Writes a file that is on the disk, not just in its cache, when this returns."""
    with path.open("w") as file:
        json.dump(value, file)
        file.flush()
        os.fsync(file.fileno())


def fault(path: Path, contents: bool) -> str | None:
    """What is wrong with a checkpoint and with which file; None when it is good."""
    if not path.is_dir():
        return "there is no such folder"
    try:
        files: dict[str, Any] = json.loads((path / MARKER).read_text())["files"]
    except FileNotFoundError:
        if not (path / STATE_FILE).exists() and (path / "checkpoints").is_dir():
            return "it is the folder of a run, not a checkpoint"
        return f"it is incomplete (no {MARKER} file): saving it was interrupted"
    except (ValueError, KeyError, TypeError):
        return f"its {MARKER} file is damaged"
    faults = (_file_fault(path / name, expected, contents) for name, expected in files.items())
    return next((fault for fault in faults if fault), None)


def offer_instead(path: Path) -> str:
    """The next step after `path` turned out to be bad: the newest good one in it or beside it, read in full to be
    sure."""
    for other in (*find(path / "checkpoints"), *find(path.parent)):
        if other != path and fault(other, contents=True) is None:
            return f"the newest good checkpoint is {other}; resume from that one"
    return f"there is no other good checkpoint in {path.parent}; start without resuming"


def _remove(path: Path) -> None:
    """Deletes a folder, which stops being a checkpoint before its first file goes."""
    if path.exists():
        doomed = path.parent / f".{path.name.strip('.').removesuffix(_REPLACED)}{_DELETED}"
        os.rename(path, doomed)
        shutil.rmtree(doomed)


def _tidy(folder: Path) -> None:
    """Clears what an interrupted save left: half-written folders go, a checkpoint that had stepped aside returns."""
    for path in folder.glob(f".step-*{_REPLACED}"):
        original = folder / path.name.strip(".").removesuffix(_REPLACED)
        if original.exists():
            _remove(path)
        else:
            os.rename(path, original)
    for suffix in (_WRITING, _DELETED):
        for path in folder.glob(f".step-*{suffix}"):
            shutil.rmtree(path)


def _step(path: Path) -> int | None:
    """The step in a checkpoint's name; None for any other folder."""
    found = re.fullmatch(rf"\.?step-(\d+)({_REPLACED})?", path.name)
    return int(found[1]) if found else None


def _file_fault(path: Path, expected: dict[str, Any], contents: bool) -> str | None:
    if not path.is_file():
        return f"{path.name} is missing"
    size = path.stat().st_size
    if size != expected["size"]:
        return f"{path.name} has {size} bytes instead of {expected['size']}"
    if contents:
        from phalanx.state.tensor_files import checksum

        if checksum(path, expected["start"]) != expected["sha256"]:
            return f"{path.name} is corrupt (its checksum does not match)"
    return None


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
