"""Checkpoints: logical tensors and a run's counters, independent of any plan, safe against a crash at any moment.

A checkpoint holds tensors by name (`model/<parameter>`, `master/<parameter>`, `optimizer/<slot>/<parameter>`) and says
nothing about ranks. This is the face of the folder: finding, opening and reading are here, writing is `saving`'s work.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.errors import CheckpointError
from phalanx.records import Malformed, read_record
from phalanx.state.folders import candidates, fault, find, latest, offer_instead
from phalanx.state.index import NewerFormat, StoredTensor, piece_key, read_index
from phalanx.state.layout import Box
from phalanx.state.rendezvous import Meeting
from phalanx.state.saving import save

if TYPE_CHECKING:
    from torch import Tensor

    from phalanx.state.tensor_files import TensorFile

__all__ = ["Checkpoint", "find", "latest", "open", "open_newest", "open_together", "save"]


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
        return self._stored(name).shape

    def dtype(self, name: str) -> str:
        """The dtype as torch names it, for example `bfloat16`."""
        return self._stored(name).dtype

    def read(self, name: str, box: Box | None = None) -> Tensor:
        """One box of a tensor (all of it without `box`), on the CPU, as it was saved; only its bytes are read."""
        box = Box.whole(self.shape(name)) if box is None else box
        return self.read_flat(name, (box,)).view(box.shape)

    def read_flat(self, name: str, boxes: Sequence[Box]) -> Tensor:
        """The elements of several boxes one after the other, each row by row: the data of a state shard."""
        import torch

        stored = self._stored(name)
        inside = Box.whole(stored.shape)
        if outside := [box for box in boxes if not inside.contains(box)]:
            raise CheckpointError(
                f"{outside[0]} is not inside {name!r} of shape {list(stored.shape)} in {self.path}",
                "it was saved by a run with another model",
            )
        flat = torch.empty(sum(box.numel for box in boxes), dtype=getattr(torch, stored.dtype))
        start = 0
        for box in boxes:
            self._fill(flat[start : start + box.numel].view(box.shape), name, stored, box)
            start += box.numel
        return flat

    def _fill(self, target: Tensor, name: str, stored: StoredTensor, box: Box) -> None:
        for piece in stored.pieces:
            common = piece.box.intersect(box)
            if common is not None:
                key = piece_key(name, stored.shape, piece.box)
                part = target[common.relative_to(box).slices()]
                try:
                    self._file(piece.file).read_into(part, key, common.relative_to(piece.box))
                except Exception as error:  # the library raises several kinds for a file that is not what it should be
                    raise CheckpointError(
                        f"{name!r} cannot be read from {self.path / piece.file}: {error}",
                        "the checkpoint is damaged: resume from another one",
                    ) from error

    def _stored(self, name: str) -> StoredTensor:
        if name not in self._tensors:
            raise CheckpointError(
                f"{self.path} holds no tensor {name!r}", "it was saved by a run with another model or optimizer"
            )
        return self._tensors[name]

    def _file(self, file: str) -> TensorFile:
        from phalanx.state.tensor_files import TensorFile

        if file not in self._files:
            self._files[file] = TensorFile(self.path / file)
        return self._files[file]


def open(path: Path, verify: bool = True) -> Checkpoint:
    """Opens a checkpoint; with `verify`, after checking every byte against its checksum."""
    if found := fault(path, contents=verify):
        raise CheckpointError(f"the checkpoint {path} cannot be used: {found}", offer_instead(path))
    try:
        record, tensors = read_index(path)
    except (Malformed, OSError) as error:
        raise CheckpointError(
            f"the checkpoint {path} cannot be used: its index is damaged ({error})", offer_instead(path)
        ) from None
    return Checkpoint(path, record.step, record.state, tensors)


def open_newest(folder: Path, meeting: Meeting, say: Callable[[str], None]) -> Checkpoint | None:
    """The newest checkpoint in `folder` that is good, None where there never was one.

    All ranks of the meeting come here; each reads its share of the bytes. Damaged checkpoints are passed over, and that
    is said; if all are damaged, that is an error and not a new beginning.
    """
    (listed, *_) = meeting.agree("list", 1, lambda: json.dumps([path.name for path in candidates(folder)]))
    faults: list[str] = []
    for name in read_record(list[str], listed):
        try:
            found = open_together(folder / name, meeting)
        except NewerFormat:
            raise
        except CheckpointError as error:
            faults.append(error.message)
            continue
        for one in faults:
            say(f"{one}; going on from {name} instead")
        return found
    if faults:
        raise CheckpointError(
            "the run has checkpoints, but none can be used:\n  " + "\n  ".join(faults),
            "copy them again from where they are good; to train from the beginning, choose another folder (--out)",
        )
    return None


def open_together(path: Path, meeting: Meeting) -> Checkpoint:
    """Opens a checkpoint on all ranks of the meeting, after each has read its share of the bytes; raises on all of them
    where one found a fault."""
    share = (meeting.rank, meeting.world)
    faults = meeting.agree(f"verify {path}", meeting.world, lambda: fault(path, contents=True, share=share) or "")
    if found := next(filter(None, faults), None):
        raise CheckpointError(f"the checkpoint {path} cannot be used: {found}", offer_instead(path))
    return open(path, verify=False)
