"""Writes a checkpoint: every rank the boxes it owns into files of its own, one rank the last act that makes it whole.

`save` does it while the caller waits; `AsyncSaver` behind training's back: a snapshot now, the writing in a thread. The
ranks must share the file system of the checkpoint folder, which is checked. The order of renames is `folders`' work.
"""

from __future__ import annotations

import copy
import shutil
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.errors import CheckpointError
from phalanx.records import read_record
from phalanx.state import folders
from phalanx.state.index import FORMAT, RankRecord, StoredPiece, StoredTensor, piece_key
from phalanx.state.layout import StateShard, check_tiles, whole
from phalanx.state.rendezvous import TIMEOUT, LocalRendezvous, Meeting, Rendezvous, is_storage

if TYPE_CHECKING:
    from torch import Tensor

    from phalanx.state.tensor_files import ShardWriter, WrittenFile

SHARD_BYTES = 2 << 30
PHASES = ("begin", "write", "finish")
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
) -> Path:
    """Writes checkpoint `step` into `folder` piece by piece and prunes to it and those written last before it; the one
    of the step `spare` stays.

    `state` must be JSON; rank 0's is written, and where it holds a mapping, what the other ranks' have beside it.
    Whatever happens, checkpoints that were complete before stay complete until this one is. With several ranks each
    calls this, with a seat in one meeting. `still_ours` raises if the folder is another run's by now.
    """
    assert keep >= 1, "pruning must leave a checkpoint"
    meeting = meeting or Meeting()
    final, partial = folders.final_folder(folder, step), None
    begin, write, finish = PHASES
    try:
        (name,) = meeting.agree(begin, 1, lambda: folders.begin(folder, step).name)
        partial = own = folder / name
        meeting.agree(write, meeting.world, lambda: _write_own(own, pieces, state, meeting))
        meeting.agree(finish, 1, lambda: _finish(own, final, step, keep, meeting.world, still_ours, spare))
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


def owned_pieces(pieces: Pieces) -> Iterable[tuple[StateShard, Tensor]]:
    """What is this rank's to write; replicas are left to their owners."""
    for item, tensor in pieces:
        shard, data = whole(item, tensor) if isinstance(item, str) else (item, tensor)
        assert tuple(data.shape) == (shard.numel,), f"{shard.name}: data of shape {tuple(data.shape)} for {shard}"
        if shard.owned:
            yield shard, data


def _write_own(partial: Path, pieces: Pieces, state: dict[str, Any], meeting: Meeting) -> None:
    from phalanx.state.tensor_files import ShardWriter, sync_folder

    if not partial.is_dir():
        raise FileNotFoundError(f"rank {meeting.rank} does not see the folder that rank 0 made; {_SHARE}")
    prefix = "tensors" if meeting.world == 1 else f"rank-{meeting.rank:05}"
    index: dict[str, StoredTensor] = {}
    with ShardWriter(partial, SHARD_BYTES, prefix=prefix) as writer:
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


def _write_shard(writer: ShardWriter, shard: StateShard, data: Tensor) -> StoredTensor:
    assert str(data.dtype) == f"torch.{shard.dtype}", f"{shard.name} is {data.dtype}, not {shard.dtype}"
    stored = []
    for box, start in shard.places():
        if box.numel:
            values = data[start : start + box.numel].view(box.shape)
            stored.append(StoredPiece(writer.add(piece_key(shard.name, shard.shape, box), values), box))
    return StoredTensor(shard.shape, shard.dtype, tuple(stored))


def _finish(
    partial: Path, final: Path, step: int, keep: int, world: int, still_ours: Callable[[], None], spare: int | None
) -> None:  # fmt: skip
    """The last act: one index of all ranks' pieces, the marker, the rename, the pruning."""
    records = [_read_index(partial, rank) for rank in range(world)]
    tensors, files = _merge_indices(records)
    state = _merge_states([record.state for record in records])
    entries = {name: entry.to_json() for name, entry in tensors.items()}
    folders.mark_complete(partial, files, {"format": FORMAT, "step": step, "state": state, "tensors": entries})
    still_ours()
    folders.put_in_place(partial, final, keep, spare)


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


class AsyncSaver:
    """Saves into one folder, keeping the `keep` newest checkpoints. `last` is the newest one this saver completed.

    With several ranks each has a saver, all save the same steps in the same order, and `rendezvous` joins them.
    """

    def __init__(
        self,
        folder: Path,
        keep: int,
        *,
        rank: int = 0,
        world: int = 1,
        rendezvous: Rendezvous | None = None,
        timeout: float = TIMEOUT,
        still_ours: Callable[[], None] = lambda: None,
    ) -> None:
        assert world == 1 or rendezvous is not None, "several ranks need a rendezvous"
        self._folder, self._keep = folder, keep
        self._rank, self._world = rank, world
        self._rendezvous = rendezvous or LocalRendezvous(rank)
        self._timeout, self._still_ours = timeout, still_ours
        self._meetings: list[Meeting] = []
        self._num_saves = 0
        self._given_up = threading.Event()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._refused: StorageError | None = None
        self.last: Path | None = None
        self.is_saving = False  # whether a checkpoint was begun that is neither complete nor refused by the disk

    def save(self, step: int, pieces: Pieces, state: dict[str, Any], spare: int | None = None) -> None:
        """Copies what this rank owns to the CPU, after which the caller may change it, and starts writing.

        Waits for the save before, whose error it raises, except for a refusal of the disk.
        """
        self.wait()
        meeting, self.is_saving = self._next_meeting(), True
        try:
            snapshot = _snapshot(pieces)
            kept = copy.deepcopy(state)
        except BaseException as error:
            for phase in PHASES:
                meeting.fail(phase, error)
            raise
        # Not a daemon: a program that ends normally finishes its last checkpoint.
        self._thread = threading.Thread(
            target=self._write, args=(step, snapshot, kept, meeting, spare), name=f"checkpoint-{step}"
        )
        self._thread.start()

    def take_refusal(self) -> StorageError | None:
        """Why the disk refused a save since this was last asked: no reason to end a run whose values are in memory."""
        refused, self._refused = self._refused, None
        return refused

    def wait(self) -> Path | None:
        """Returns the newest completed checkpoint once nothing is being written; raises what went wrong since, except
        what `take_refusal` tells."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        return self.last

    def give_up(self) -> None:
        """Stops waiting for other ranks, because they are known to be gone; `wait` then raises soon."""
        self._given_up.set()

    def _next_meeting(self) -> Meeting:
        key = f"checkpoint/{self._num_saves}"
        self._num_saves += 1
        meeting = Meeting(self._rank, self._world, self._rendezvous, self._timeout, key, self._given_up)
        self._meetings.append(meeting)
        # Whoever takes part in the save before this one has ended those before it.
        for old in self._meetings[:-2]:
            for phase in PHASES:
                old.forget(phase)
        del self._meetings[:-2]
        return meeting

    def _write(
        self, step: int, snapshot: list[tuple[StateShard, Tensor]], state: dict[str, Any], meeting: Meeting,
        spare: int | None,
    ) -> None:  # fmt: skip
        try:
            self.last = save(
                self._folder, step, snapshot, state, self._keep, meeting=meeting, still_ours=self._still_ours,
                spare=spare,
            )  # fmt: skip
            self.is_saving = False
        except StorageError as error:
            error.step = step
            self._refused, self.is_saving = error, False
        except BaseException as error:
            self._error = error


def _snapshot(pieces: Pieces) -> list[tuple[StateShard, Tensor]]:
    """Copies in memory of their own; from a GPU through pinned memory, all copies in flight together."""
    import torch

    copies: list[tuple[StateShard, Tensor]] = []
    devices: set[torch.device] = set()
    for shard, data in owned_pieces(pieces):
        if data.is_cuda:
            devices.add(data.device)
            target = torch.empty(data.shape, dtype=data.dtype, pin_memory=True)
            copies.append((shard, target.copy_(data.detach(), non_blocking=True)))
        else:
            copies.append((shard, data.detach().to("cpu", copy=True)))
    for device in devices:
        torch.cuda.current_stream(device).synchronize()
    return copies
