from __future__ import annotations

import multiprocessing
import random
import signal
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from phalanx.errors import CheckpointError, StoreError
from phalanx.launch.store import JobStore
from phalanx.state import checkpoint, folders, saving, tensor_files
from phalanx.state.background import AsyncSaver
from phalanx.state.layout import Box, StateShard
from phalanx.state.rendezvous import LocalRendezvous, MissingRanks, Rendezvous, StoreRendezvous
from tests.state import state_workers
from tests.state.state_workers import SHAPE, data_of, on_threads, pieces_of, random_case, same_bits, state_of


def savers(folder: Path, world: int, *, keep: int = 2, timeout: float = 20) -> list[AsyncSaver]:
    board: dict[str, str] = {}
    return [
        AsyncSaver(folder, keep, rank=rank, world=world, rendezvous=LocalRendezvous(rank, board), timeout=timeout)
        for rank in range(world)
    ]


def assert_good(path: Path, step: int) -> None:
    opened = checkpoint.open(path)
    assert opened.step == step and opened.state == {"step": step}
    for name in ("model/a", "model/b"):
        assert torch.equal(opened.read(name), state_of(step))


def test_ranks_write_one_checkpoint_that_knows_nothing_of_them(tmp_path: Path) -> None:
    world = 3
    ranks = savers(tmp_path, world, keep=2)
    for step in (1, 2, 3, 4):
        for rank, saver in enumerate(ranks):
            saver.save(step, pieces_of(rank, world, step), {"step": step} if rank == 0 else {})
    assert [saver.wait() for saver in ranks] == [tmp_path / "step-00000004"] * world
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000003", "step-00000004"]
    assert_good(tmp_path / "step-00000003", 3)
    assert_good(tmp_path / "step-00000004", 4)
    written = sorted(path.name for path in (tmp_path / "step-00000004").iterdir())
    assert written == ["COMPLETE", *(f"rank-0000{rank}-00000.safetensors" for rank in range(world)), "state.json"]


def test_what_only_one_rank_knows_is_kept_whichever_rank_that_is(tmp_path: Path) -> None:
    known = [{"step": 1, "numbers": {"a": 1, "both": 0}}, {"step": 1, "numbers": {"b": 2, "both": 0}}]
    ranks = savers(tmp_path, 2)
    for rank, saver in enumerate(ranks):
        saver.save(1, pieces_of(rank, 2, 1), known[rank])
    saved = ranks[0].wait()
    assert saved is not None
    assert checkpoint.open(saved).state == {"step": 1, "numbers": {"a": 1, "b": 2, "both": 0}}
    ranks[1].wait()


def test_any_layout_is_saved_and_read_by_boxes_bit_for_bit(tmp_path: Path) -> None:
    for seed in range(30):
        old, new, values = random_case(random.Random(seed), 3)
        ranks = savers(tmp_path, 3, keep=1)
        for rank, saver in enumerate(ranks):
            data = data_of(old[rank], values)
            saver.save(seed, [(shard, data[shard.name]) for shard in old[rank]], {})
        opened = checkpoint.open(next(path for path in [saver.wait() for saver in ranks] if path))
        assert sorted(opened.names()) == sorted(values)
        for shard in (shard for shards in new.values() for shard in shards):
            found = opened.read_flat(shard.name, shard.boxes)
            assert same_bits({shard.name: found}, data_of([shard], values))
        assert same_bits({name: opened.read(name) for name in values}, values)


def test_a_box_over_several_files_reads_only_its_bytes(tmp_path: Path) -> None:
    ranks = savers(tmp_path, 3)
    for rank, saver in enumerate(ranks):
        saver.save(1, pieces_of(rank, 3, 1), {"step": 1})
    path = ranks[0].wait()
    assert path is not None
    opened = checkpoint.open(path)
    box = Box((1, 1), (7, 2))
    found = opened.read("model/a", box)
    assert torch.equal(found, state_of(1)[box.slices()])
    assert found.untyped_storage().nbytes() == box.numel * 4
    opened = checkpoint.open(path)
    (path / "rank-00002-00000.safetensors").unlink()
    first_rows = opened.read("model/a", Box((0, 0), (3, 4)))
    assert torch.equal(first_rows, state_of(1)[:3]), "a file that holds none of the box is not opened"


def test_replicas_are_left_to_their_owner(tmp_path: Path) -> None:
    box = Box.whole(SHAPE)
    ranks = savers(tmp_path, 2)
    for rank, saver in enumerate(ranks):
        saver.save(1, [(StateShard("w", SHAPE, "float32", (box,), owned=rank == 1), state_of(rank).reshape(-1))], {})
    path = ranks[0].wait()
    assert path is not None and torch.equal(checkpoint.open(path).read("w"), state_of(1))


def test_what_no_rank_or_two_ranks_own_is_not_saved(tmp_path: Path) -> None:
    half = StateShard("w", (4,), "float32", (Box((0,), (2,)),))
    for world, said in ((1, "owners hold 2 of the 4 elements of w"), (2, "w is held twice")):
        ranks = savers(tmp_path, world)
        for saver in ranks:
            saver.save(1, [(half, torch.ones(2))], {})
        with pytest.raises(AssertionError, match=said):
            ranks[0].wait()
        for saver in ranks[1:]:
            with pytest.raises(CheckpointError, match=f"rank 0 failed: .*{said}"):
                saver.wait()
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("broken", [0, 1, 2])
@pytest.mark.parametrize("phase", ["writing", "copying"])
def test_the_failure_of_one_rank_is_told_to_all_at_once(
    tmp_path: Path, broken: int, phase: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = savers(tmp_path, 3)
    for rank, saver in enumerate(ranks):
        saver.save(1, pieces_of(rank, 3, 1), {"step": 1})
    for saver in ranks:
        saver.wait()
    write = saving._write_own

    def fail_on_one(partial: Path, pieces: object, state: object, meeting: object, held: bool) -> object:
        if meeting.rank == broken:  # type: ignore[attr-defined]
            raise OSError(28, "No space left on device")
        return write(partial, pieces, state, meeting, held)  # type: ignore[arg-type]

    began = time.monotonic()
    if phase == "writing":
        monkeypatch.setattr(saving, "_write_own", fail_on_one)

    def body(rank: int) -> str:
        def stream() -> object:
            yield from pieces_of(rank, 3, 2)
            if phase == "copying" and rank == broken:
                raise OSError(28, "No space left on device")

        try:
            ranks[rank].save(2, stream(), {"step": 2})  # type: ignore[arg-type]
        except OSError as error:
            assert phase == "copying" and rank == broken
            return str(error)
        # A disk that refuses is no reason to end a run: every rank is told, none fails.
        ranks[rank].wait()
        refused = ranks[rank].take_refusal()
        assert refused is not None and refused.step == 2 and ranks[rank].take_refusal() is None
        return str(refused)

    told = on_threads(3, body)
    assert all("No space left on device" in text for text in told)
    assert all(f"rank {broken} failed: " in text for rank, text in enumerate(told) if rank != broken)
    assert time.monotonic() - began < 10
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    monkeypatch.undo()
    for rank, saver in enumerate(ranks):
        saver.save(3, pieces_of(rank, 3, 3), {"step": 3})
    assert_good(ranks[1].wait() or tmp_path, 3)


def test_a_failure_without_words_is_told_by_its_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise MemoryError

    monkeypatch.setattr(saving, "_merge_indices", fail)
    ranks = savers(tmp_path, 2)
    for rank, saver in enumerate(ranks):
        saver.save(1, pieces_of(rank, 2, 1), {"step": 1})
    with pytest.raises(MemoryError):
        ranks[0].wait()
    with pytest.raises(CheckpointError, match="rank 0 failed: MemoryError"):
        ranks[1].wait()


def test_a_rank_that_never_comes_is_named(tmp_path: Path) -> None:
    ranks = savers(tmp_path, 3, timeout=1.5)
    for rank in (0, 2):
        ranks[rank].save(1, pieces_of(rank, 3, 1), {"step": 1})
    for rank in (0, 2):
        with pytest.raises(CheckpointError, match=r"rank 1 did not report within 1.5 s\n.*earlier .* are intact"):
            ranks[rank].wait()
    assert list(tmp_path.iterdir()) == []


def test_giving_up_ends_the_waiting_for_ranks_that_are_gone(tmp_path: Path) -> None:
    saver = savers(tmp_path, 2, timeout=300)[0]
    saver.save(1, pieces_of(0, 2, 1), {"step": 1})
    saver.give_up()
    began = time.monotonic()
    with pytest.raises(CheckpointError, match=r"could not save .*: it was given up"):
        saver.wait()
    assert time.monotonic() - began < 5


def test_a_folder_that_is_not_shared_is_said(tmp_path: Path) -> None:
    board: dict[str, str] = {}
    ranks = [
        AsyncSaver(tmp_path / str(rank), 1, rank=rank, world=2, rendezvous=LocalRendezvous(rank, board), timeout=5)
        for rank in range(2)
    ]
    for rank, saver in enumerate(ranks):
        saver.save(1, pieces_of(rank, 2, 1), {"step": 1})
    for saver in ranks:
        with pytest.raises(CheckpointError, match=r"rank 1 does not see the folder .* that all ranks share"):
            saver.wait()


def test_files_that_rank_0_does_not_see_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_json = folders.write_json
    monkeypatch.setattr(
        folders, "write_json", lambda path, value: None if "index-00001" in path.name else write_json(path, value)
    )
    ranks = savers(tmp_path, 2)
    for rank, saver in enumerate(ranks):
        saver.save(1, pieces_of(rank, 2, 1), {"step": 1})
    for saver in ranks:
        with pytest.raises(CheckpointError, match="rank 0 does not see the files that rank 1 wrote"):
            saver.wait()


@pytest.mark.parametrize("damaged", [0, 1])
def test_older_ones_stay_until_what_was_written_was_read_back(
    tmp_path: Path, damaged: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = savers(tmp_path, 2, keep=1)
    read_back = tensor_files.checksum

    def damaged_disk(path: Path, start: int = 0) -> str:
        is_bad = path.parent.name == "step-00000002" and path.name.startswith(f"rank-0000{damaged}")
        return "other bytes" if is_bad else read_back(path, start)

    monkeypatch.setattr(tensor_files, "checksum", damaged_disk)
    for step in (1, 2):
        for rank, saver in enumerate(ranks):
            saver.save(step, pieces_of(rank, 2, step), {"step": step})
    for saver in ranks:
        assert saver.wait() == tmp_path / "step-00000001"
        refused = saver.take_refusal()
        assert refused is not None and refused.step == 2
        assert "what is on the disk is not what was written" in refused.message
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    assert_good(tmp_path / "step-00000001", 1)


@pytest.mark.parametrize("room", [0, 100, None])
def test_without_room_for_copies_the_caller_waits_until_it_is_written(tmp_path: Path, room: int | None) -> None:
    board: dict[str, str] = {}
    saver = AsyncSaver(tmp_path, 1, rendezvous=LocalRendezvous(0, board), room=lambda: room)
    values = {name: torch.arange(20.0) for name in ("a", "b", "c")}
    saver.save(1, list(values.items()), {})
    for tensor in values.values():
        tensor.zero_()
    path = saver.wait()
    assert path is not None and saver.facts.in_background == (room is None)
    opened = checkpoint.open(path)
    assert all(torch.equal(opened.read(name), torch.arange(20.0)) for name in values)


def test_a_store_that_is_gone_is_no_failure_of_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says that a rank is lost, which those who watch ranks must hear as that."""
    (saver, _) = savers(tmp_path, 2)

    def gone(*_: object) -> None:
        raise StoreError("the store of the job does not answer")

    monkeypatch.setattr(LocalRendezvous, "arrive", gone)
    saver.save(1, pieces_of(0, 2, 1), {})
    with pytest.raises(StoreError, match=r"^the store of the job does not answer"):
        saver.wait()


SECRET = b"known to these ranks"


def stores(folder: Path, kind: str) -> list[Rendezvous]:
    if kind == "local":
        board: dict[str, str] = {}
        return [LocalRendezvous(rank, board) for rank in range(2)]
    if kind == "file":
        file = str(folder / "store")
        return [StoreRendezvous(JobStore(dist.FileStore(file, 2), SECRET, "job"), rank) for rank in range(2)]
    store = JobStore(dist.HashStore(), SECRET, "job")
    return [StoreRendezvous(store, rank) for rank in range(2)]


@pytest.mark.parametrize("kind", ["local", "file", "hash"])
def test_ranks_meet(tmp_path: Path, kind: str) -> None:
    zero, one = stores(tmp_path, kind)
    zero.arrive("a", "first")
    assert one.wait_all("a", 1, 1) == ["first"]
    with pytest.raises(MissingRanks, match=r"rank 1 did not report within 0.05 s") as caught:
        zero.wait_all("a", 2, 0.05)
    assert caught.value.ranks == (1,)
    one.arrive("a", "")
    assert zero.wait_all("a", 2, 1) == ["first", ""]
    zero.forget("a")
    with pytest.raises(MissingRanks, match="rank 0 did"):
        one.wait_all("a", 2, 0.05)


def test_reports_of_finished_saves_do_not_pile_up(tmp_path: Path) -> None:
    board: dict[str, str] = {}
    saver = AsyncSaver(tmp_path, 1, rendezvous=LocalRendezvous(0, board))
    for step in range(10):
        saver.save(step, [("w", torch.ones(2))], {})
    saver.wait()
    assert len(board) == 2 * len(saving.PHASES)


@pytest.mark.parametrize(("victim", "moment"), [(1, "write"), (2, "index"), (0, "write"), (0, "rename")])
def test_a_rank_killed_while_saving_leaves_the_checkpoint_before_and_is_named(
    tmp_path: Path, victim: int, moment: str
) -> None:
    world, folder = 3, tmp_path / "checkpoints"
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))
    # Not forked from here: this process has threads (the store's), whose locks a fork would copy as they stand.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.state.state_workers"])
    processes = [
        context.Process(
            target=state_workers.save_in_a_process,
            args=(rank, world, server.port, folder, victim, moment, tmp_path / str(rank)),
        )
        for rank in range(world)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert processes[victim].exitcode == -signal.SIGKILL
    for rank in set(range(world)) - {victim}:
        assert processes[rank].exitcode == 0
        told = (tmp_path / str(rank)).read_text()
        assert told.startswith("CheckpointError") and f"rank {victim} did not report within 2 s" in told
    assert [path.name for path in checkpoint.find(folder)] == ["step-00000001"]
    assert_good(folder / "step-00000001", 1)
    alone = checkpoint.save(folder, 3, [("model/a", state_of(3)), ("model/b", state_of(3))], {"step": 3}, keep=1)
    assert_good(alone, 3)
    assert [path.name for path in folder.iterdir()] == ["step-00000003"]
