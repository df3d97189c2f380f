"""Writes a checkpoint: every rank the boxes it owns into files of its own, one rank the last act that makes it whole.

The ranks must share the file system of the checkpoint folder, which is checked. Copies and threads are `async_saver`'s
work, the order of renames is `folders`'.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.errors import CheckpointError
from phalanx.state import folders
from phalanx.state.layout import Holding, check_tiles, whole
from phalanx.state.meeting import Meeting
from phalanx.state.stored import FORMAT, StoredPiece, StoredTensor, piece_key

if TYPE_CHECKING:
    from torch import Tensor

    from phalanx.state.shards import ShardWriter, WrittenFile

SHARD_BYTES = 2 << 30
PHASES = ("begin", "write", "finish")

Pieces = Iterable[tuple["Holding | str", "Tensor"]]
"""Holdings with their flat data; a name alone says that the tensor is whole and owned by this rank."""


def save(
    folder: Path, step: int, pieces: Pieces, state: dict[str, Any], keep: int, *, meeting: Meeting | None = None
) -> Path:
    """Writes checkpoint `step` into `folder` piece by piece and prunes to the `keep` newest complete ones.

    `state` must be JSON; rank 0's is written, and where it holds a mapping, what the other ranks' have beside it.
    Whatever happens, checkpoints that were complete before stay complete until this one is. With several ranks each
    calls this, with a seat in one meeting.
    """
    assert keep >= 1, "pruning must leave a checkpoint"
    meeting = meeting or Meeting()
    final, partial = folders.final_folder(folder, step), folders.partial_folder(folder, step)
    begin, write, finish = PHASES
    try:
        meeting.agree(begin, 1, lambda: folders.begin(folder, step))
        meeting.agree(write, meeting.world, lambda: _write_own(partial, pieces, state, meeting))
        meeting.agree(finish, 1, lambda: _finish(partial, final, step, keep, meeting.world))
    except (OSError, RuntimeError) as error:
        raise CheckpointError(
            f"could not save the checkpoint {final}: {error}",
            f"earlier checkpoints in {folder} are intact; free space or find out what stopped the rank, then go on",
        ) from error
    finally:
        if meeting.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
    return final


def owned_pieces(pieces: Pieces) -> Iterable[tuple[Holding, Tensor]]:
    """What is this rank's to write; replicas are left to their owners."""
    for item, tensor in pieces:
        holding, data = whole(item, tensor) if isinstance(item, str) else (item, tensor)
        assert tuple(data.shape) == (holding.numel,), f"{holding.name}: data of shape {tuple(data.shape)} for {holding}"
        if holding.owned:
            yield holding, data


def _write_own(partial: Path, pieces: Pieces, state: dict[str, Any], meeting: Meeting) -> None:
    from phalanx.state.shards import ShardWriter, sync_folder

    if not partial.is_dir():
        raise FileNotFoundError(f"rank {meeting.rank} does not see the folder that rank 0 made; {_SHARE}")
    prefix = "tensors" if meeting.world == 1 else f"rank-{meeting.rank:05}"
    index: dict[str, StoredTensor] = {}
    with ShardWriter(partial, SHARD_BYTES, prefix=prefix) as writer:
        for holding, data in owned_pieces(pieces):
            assert holding.name not in index, f"{holding.name} is saved twice"
            index[holding.name] = _write_holding(writer, holding, data)
        files = writer.close()
    record = {
        "files": [asdict(file) for file in files],
        "tensors": {name: entry.to_json() for name, entry in index.items()},
        "state": state,
    }
    folders.write_json(_index_file(partial, meeting.rank), record)
    sync_folder(partial)


def _write_holding(writer: ShardWriter, holding: Holding, data: Tensor) -> StoredTensor:
    assert str(data.dtype) == f"torch.{holding.dtype}", f"{holding.name} is {data.dtype}, not {holding.dtype}"
    stored = []
    for box, start in holding.places():
        if box.numel:
            values = data[start : start + box.numel].view(box.shape)
            stored.append(StoredPiece(writer.add(piece_key(holding.name, holding.shape, box), values), box))
    return StoredTensor(holding.shape, holding.dtype, tuple(stored))


def _finish(partial: Path, final: Path, step: int, keep: int, world: int) -> None:
    """The last act: one index of all ranks' pieces, the marker, the rename, the pruning."""
    records = [_read_index(partial, rank) for rank in range(world)]
    tensors, files = _merge_indices(records)
    state = _merge_states([record["state"] for record in records])
    entries = {name: entry.to_json() for name, entry in tensors.items()}
    folders.mark_complete(partial, files, {"format": FORMAT, "step": step, "state": state, "tensors": entries})
    folders.put_in_place(partial, final, keep)


def _read_index(partial: Path, rank: int) -> dict[str, Any]:
    path = _index_file(partial, rank)
    if not path.is_file():
        raise FileNotFoundError(f"rank 0 does not see the files that rank {rank} wrote; {_SHARE}")
    record = json.loads(path.read_text())
    path.unlink()
    return record


def _merge_indices(records: Sequence[dict[str, Any]]) -> tuple[dict[str, StoredTensor], list[WrittenFile]]:
    from phalanx.state.shards import WrittenFile

    tensors: dict[str, StoredTensor] = {}
    files: list[WrittenFile] = []
    for record in records:
        files += [WrittenFile(**file) for file in record["files"]]
        for name, entry in record["tensors"].items():
            stored = StoredTensor.from_json(entry)
            tensors[name] = _joined(name, tensors[name], stored) if name in tensors else stored
    for name, stored in tensors.items():
        check_tiles(name, stored.shape, [piece.box for piece in stored.pieces])
    return tensors, files


def _merge_states(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Ranks agree on everything but mappings of which each knows only its part."""
    merged = dict(states[0])
    for state in states[1:]:
        for name, value in state.items():
            if isinstance(value, dict) and isinstance(mine := merged.get(name), dict):
                merged[name] = {**value, **mine}
    return merged


def _joined(name: str, one: StoredTensor, other: StoredTensor) -> StoredTensor:
    same = (one.shape, one.dtype) == (other.shape, other.dtype)
    assert same, f"ranks disagree on what {name} is: {one.shape} {one.dtype}, {other.shape} {other.dtype}"
    return StoredTensor(one.shape, one.dtype, one.pieces + other.pieces)


_SHARE = "the checkpoint folder must be on a file system that all ranks share"


def _index_file(partial: Path, rank: int) -> Path:
    return partial / f"index-{rank:05}.json"
