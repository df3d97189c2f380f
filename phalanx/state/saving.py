"""Writes a checkpoint: every rank the boxes it owns into files of its own, one rank the last act that makes it whole.

`save` does it while the caller waits; `background` does it behind training's back. The ranks must share the file system
of the checkpoint folder, which is checked. The order of renames is `folders`' work.
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.errors import CheckpointError, StoreError
from phalanx.records import read_record
from phalanx.state import folders
from phalanx.state.index import FORMAT, RankRecord, StoredPiece, StoredTensor, piece_key
from phalanx.state.layout import StateShard, check_tiles, whole
from phalanx.state.rendezvous import Meeting, is_storage

if TYPE_CHECKING:
    from torch import Tensor

    from phalanx.state.tensor_files import ShardWriter, WrittenFile

SHARD_BYTES = 2 << 30
_READERS = 4
PHASES = ("begin", "write", "finish", "verify", "prune")
_SHARE = "the checkpoint folder must be on a file system that all ranks share"

Pieces = Iterable[tuple["StateShard | str", "Tensor"]]
"""State shards with their flat data; a name alone says that the tensor is whole and owned by this rank."""


class StorageError(CheckpointError):
    """A checkpoint of `step` that the disk refused; what it was to hold is still in memory."""

    step = -1


def save(
    folder: Path,
    step: int,
    pieces: Pieces,
    state: dict[str, Any],
    keep: int,
    *,
    meeting: Meeting | None = None,
    still_ours: Callable[[], None] = lambda: None,
    spare: int | None = None,
    held: bool = False,
) -> Path:
    """Writes checkpoint `step` into `folder` piece by piece and prunes to it and those written last before it; the one
    of the step `spare` stays. Nothing is deleted before what was written has been read back as it was.

    `state` must be JSON; rank 0's is written, and where it holds a mapping, what the other ranks' have beside it.
    Whatever happens, checkpoints that were complete before stay complete until this one is. With several ranks each
    calls this, with a seat in one meeting. `still_ours` raises if the folder is another run's by now. held:
    whether tensors stay as they are until this returns, and need not be copied.
    """
    assert keep >= 1, "pruning must leave a checkpoint"
    meeting = meeting or Meeting()
    final, partial, written = folders.final_folder(folder, step), None, list["WrittenFile"]()
    begin, write, finish, verify, prune = PHASES

    def write_own() -> None:
        written.extend(_write_own(own, pieces, state, meeting, held))

    def finished() -> str:
        _finish(own, final, step, meeting.world, still_ours)
        return "more than are kept" if folders.surplus(final, keep, spare) else ""

    try:
        (name,) = meeting.agree(begin, 1, lambda: folders.begin(folder, step).name)
        partial = own = folder / name
        meeting.agree(write, meeting.world, write_own)
        (surplus,) = meeting.agree(finish, 1, finished)
        if surplus:
            _verified(meeting, verify, final, written)
            meeting.agree(prune, 1, lambda: folders.prune(final, keep, spare))
    except StoreError:
        raise  # it is no fault of the checkpoint's that somebody is lost: whoever watches the ranks says who
    except (OSError, RuntimeError) as error:
        kind = StorageError if is_storage(error) else CheckpointError
        raise kind(
            f"could not save the checkpoint {final}: {error}",
            f"earlier checkpoints in {folder} are intact; free space or find out what stopped the rank, then go on",
        ) from error
    finally:
        if meeting.rank == 0 and partial is not None:
            shutil.rmtree(partial, ignore_errors=True)
    return final


def _verified(meeting: Meeting, phase: str, final: Path, written: Sequence[WrittenFile]) -> None:
    """Every rank reads back what it wrote. A checkpoint that is not what was written steps back from its place."""
    from phalanx.state.tensor_files import checksum

    def check(file: WrittenFile) -> None:
        if checksum(final / file.name, file.start) != file.sha256:
            raise OSError(errno.EIO, "what is on the disk is not what was written", str(final / file.name))

    def read_back() -> None:
        with ThreadPoolExecutor(_READERS) as readers:
            list(readers.map(check, written))

    try:
        meeting.agree(phase, meeting.world, read_back)
    except (OSError, RuntimeError) as error:
        if meeting.rank == 0 and is_storage(error):
            folders.step_back(final)
        raise


def owned_pieces(pieces: Pieces) -> Iterable[tuple[StateShard, Tensor]]:
    """What is this rank's to write; replicas are left to their owners."""
    for item, tensor in pieces:
        shard, data = whole(item, tensor) if isinstance(item, str) else (item, tensor)
        assert tuple(data.shape) == (shard.numel,), f"{shard.name}: data of shape {tuple(data.shape)} for {shard}"
        if shard.owned:
            yield shard, data


def _write_own(partial: Path, pieces: Pieces, state: dict[str, Any], meeting: Meeting, held: bool) -> list[WrittenFile]:
    from phalanx.state.tensor_files import ShardWriter, sync_folder

    if not partial.is_dir():
        raise FileNotFoundError(f"rank {meeting.rank} does not see the folder that rank 0 made; {_SHARE}")
    prefix = "tensors" if meeting.world == 1 else f"rank-{meeting.rank:05}"
    index: dict[str, StoredTensor] = {}
    with ShardWriter(partial, SHARD_BYTES, prefix=prefix, copies=not held) as writer:
        for shard, data in owned_pieces(pieces):
            assert shard.name not in index, f"{shard.name} is saved twice"
            index[shard.name] = _write_shard(writer, shard, data)
        files = writer.close()
    record = {
        "files": [asdict(file) for file in files],
        "tensors": {name: entry.to_json() for name, entry in index.items()},
        "state": state,
    }
    folders.write_json(_index_file(partial, meeting.rank), record)
    sync_folder(partial)
    return files


def _write_shard(writer: ShardWriter, shard: StateShard, data: Tensor) -> StoredTensor:
    assert str(data.dtype) == f"torch.{shard.dtype}", f"{shard.name} is {data.dtype}, not {shard.dtype}"
    stored = []
    for box, start in shard.places():
        if box.numel:
            values = data[start : start + box.numel].view(box.shape)
            stored.append(StoredPiece(writer.add(piece_key(shard.name, shard.shape, box), values), box))
    return StoredTensor(shard.shape, shard.dtype, tuple(stored))


def _finish(partial: Path, final: Path, step: int, world: int, still_ours: Callable[[], None]) -> None:
    """The last act: one index of all ranks' pieces, the marker, the rename."""
    records = [_read_index(partial, rank) for rank in range(world)]
    tensors, files = _merge_indices(records)
    state = _merge_states([record.state for record in records])
    entries = {name: entry.to_json() for name, entry in tensors.items()}
    folders.mark_complete(partial, files, {"format": FORMAT, "step": step, "state": state, "tensors": entries})
    still_ours()
    folders.put_in_place(partial, final)


def _read_index(partial: Path, rank: int) -> RankRecord:
    path = _index_file(partial, rank)
    if not path.is_file():
        raise FileNotFoundError(f"rank 0 does not see the files that rank {rank} wrote; {_SHARE}")
    record = read_record(RankRecord, path.read_bytes())
    path.unlink()
    return record


def _merge_indices(records: Sequence[RankRecord]) -> tuple[dict[str, StoredTensor], list[WrittenFile]]:
    from phalanx.state.tensor_files import WrittenFile

    tensors: dict[str, StoredTensor] = {}
    files: list[WrittenFile] = []
    for record in records:
        files += [WrittenFile(**file) for file in record.files]
        for name, entry in record.tensors.items():
            stored = entry.stored()
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


def _index_file(partial: Path, rank: int) -> Path:
    return partial / f"index-{rank:05}.json"
