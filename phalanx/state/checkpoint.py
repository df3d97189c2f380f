"""Checkpoints: logical tensors and a run's counters, independent of any plan, safe against a crash at any moment.

A checkpoint is a folder that appears whole or not at all. It holds tensors by name (`model/<parameter>`,
`master/<parameter>`, `optimizer/<slot>/<parameter>`) and says nothing about ranks; who holds what is a layout's work.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.errors import CheckpointError
from phalanx.state.layout import Box

if TYPE_CHECKING:
    from torch import Tensor

    from phalanx.state.shards import TensorFile, WrittenFile

FORMAT = 1
SHARD_BYTES = 2 << 30
MARKER = "COMPLETE"
STATE_FILE = "state.json"

# A name that starts with a dot is never a checkpoint, except one set aside while another takes its place.
_WRITING, _REPLACED, _DELETED = ".writing", ".replaced", ".deleted"


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies and what it is."""

    file: str
    shape: tuple[int, ...]
    dtype: str


class Checkpoint:
    """An opened checkpoint. `state` is what was given to `save`."""

    def __init__(self, path: Path, step: int, state: dict[str, Any], tensors: dict[str, StoredTensor]) -> None:
        self.path = path
        self.step = step
        self.state = state
        self._tensors = tensors
        self._files: dict[str, TensorFile] = {}

    def names(self) -> tuple[str, ...]:
        return tuple(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def dtype(self, name: str) -> str:
        """The dtype as torch names it, for example `bfloat16`."""
        return self._tensors[name].dtype

    def read(self, name: str, box: Box | None = None) -> Tensor:
        """One box of a tensor (all of it without `box`), on the CPU, as it was saved."""
        from phalanx.state.shards import TensorFile

        if name not in self._tensors:
            raise CheckpointError(
                f"{self.path} holds no tensor {name!r}", "it was saved by a run with another model or optimizer"
            )
        file = self._tensors[name].file
        if file not in self._files:
            self._files[file] = TensorFile(self.path / file)
        return self._files[file].read(name, box)


def save(folder: Path, step: int, tensors: Iterable[tuple[str, Tensor]], state: dict[str, Any], keep: int) -> Path:
    """Writes checkpoint `step` into `folder` tensor by tensor and prunes to the `keep` newest complete ones.

    `state` must be JSON. Whatever happens, checkpoints that were complete before stay complete until this one is.
    """
    assert keep >= 1, "pruning must leave a checkpoint"
    final = folder / f"step-{step:08}"
    partial = folder / f".{final.name}{_WRITING}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _tidy(folder)
        partial.mkdir()
        _write(partial, step, tensors, state)
        _put_in_place(partial, final)
        _prune(folder, keep)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise CheckpointError(
            f"could not save the checkpoint {final}: {error}", f"earlier checkpoints in {folder} are intact; free space"
        ) from error
    return final


def find(folder: Path) -> list[Path]:
    """Complete checkpoints, newest first. Looks at markers and file sizes, not at contents."""
    complete: dict[int, Path] = {}
    for path in [*folder.glob("step-*"), *folder.glob(f".step-*{_REPLACED}")]:
        step = _step(path)
        if step is not None and _fault(path, contents=False) is None:
            complete.setdefault(step, path)
    return [complete[step] for step in sorted(complete, reverse=True)]


def latest(folder: Path) -> Path | None:
    """The newest complete checkpoint, or None."""
    return next(iter(find(folder)), None)


def open(path: Path, verify: bool = True) -> Checkpoint:
    """Opens a checkpoint; with `verify`, after checking every byte against its checksum."""
    if fault := _fault(path, contents=verify):
        raise CheckpointError(f"the checkpoint {path} cannot be used: {fault}", _offer_instead(path))
    record = json.loads((path / STATE_FILE).read_text())
    if record["format"] > FORMAT:
        raise CheckpointError(
            f"the checkpoint {path} has format {record['format']}; this version reads formats up to {FORMAT}",
            "resume with the version of Phalanx that wrote it, or a newer one",
        )
    tensors = {
        name: StoredTensor(entry["file"], tuple(entry["shape"]), entry["dtype"])
        for name, entry in record["tensors"].items()
    }
    return Checkpoint(path, record["step"], record["state"], tensors)


def _write(folder: Path, step: int, tensors: Iterable[tuple[str, Tensor]], state: dict[str, Any]) -> None:
    from phalanx.state.shards import ShardWriter, checksum, sync_folder

    index: dict[str, StoredTensor] = {}
    with ShardWriter(folder, SHARD_BYTES) as writer:
        for name, tensor in tensors:
            assert name not in index, f"{name} is saved twice"
            file = writer.add(name, tensor)
            index[name] = StoredTensor(file, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        files = writer.close()
    entries = {name: asdict(entry) for name, entry in index.items()}
    _write_json(folder / STATE_FILE, {"format": FORMAT, "step": step, "state": state, "tensors": entries})
    _write_json(folder / MARKER, _marker(files, folder / STATE_FILE, checksum(folder / STATE_FILE)))
    sync_folder(folder)


def _marker(files: list[WrittenFile], state: Path, state_checksum: str) -> dict[str, Any]:
    entries = {file.name: {"size": file.size, "start": file.start, "sha256": file.sha256} for file in files}
    entries[state.name] = {"size": state.stat().st_size, "start": 0, "sha256": state_checksum}
    return {"files": entries}


def _write_json(path: Path, value: dict[str, Any]) -> None:
    with path.open("w") as file:
        json.dump(value, file)
        file.flush()
        os.fsync(file.fileno())


def _put_in_place(partial: Path, final: Path) -> None:
    """Renames a finished folder to its name. One already there steps aside first and is found there if we die."""
    from phalanx.state.shards import sync_folder

    aside = final.parent / f".{final.name}{_REPLACED}"
    if final.exists():
        os.rename(final, aside)
    os.rename(partial, final)
    sync_folder(final.parent)
    _remove(aside)


def _prune(folder: Path, keep: int) -> None:
    for path in find(folder)[keep:]:
        _remove(path)


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


def _fault(path: Path, contents: bool) -> str | None:
    """What is wrong with a checkpoint and with which file; None when it is good."""
    if not path.is_dir():
        return "there is no such folder"
    try:
        files: dict[str, Any] = json.loads((path / MARKER).read_text())["files"]
    except FileNotFoundError:
        return f"it is incomplete (no {MARKER} file): saving it was interrupted"
    except (ValueError, KeyError, TypeError):
        return f"its {MARKER} file is damaged"
    faults = (_file_fault(path / name, expected, contents) for name, expected in files.items())
    return next((fault for fault in faults if fault), None)


def _file_fault(path: Path, expected: dict[str, Any], contents: bool) -> str | None:
    if not path.is_file():
        return f"{path.name} is missing"
    size = path.stat().st_size
    if size != expected["size"]:
        return f"{path.name} has {size} bytes instead of {expected['size']}"
    if contents:
        from phalanx.state.shards import checksum

        if checksum(path, expected["start"]) != expected["sha256"]:
            return f"{path.name} is corrupt (its checksum does not match)"
    return None


def _offer_instead(path: Path) -> str:
    """The next step after `path` turned out to be bad: the newest good one beside it, read in full to be sure."""
    for other in find(path.parent):
        if other != path and _fault(other, contents=True) is None:
            return f"the newest good checkpoint is {other}; resume from that one"
    return f"there is no other good checkpoint in {path.parent}; start without resuming"
