"""The folder of a run in bad times: another run in it, damaged checkpoints, a disk that is full."""

from __future__ import annotations

import json
import os
import resource
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx.config import RunConfig
from phalanx.errors import CheckpointError, ConfigError, PhalanxError
from phalanx.launch.context import RankContext
from phalanx.launch.worker_pool import WorkerPool
from phalanx.observe.runlog import RunLog, read_log
from phalanx.state import checkpoint, folders, huggingface, saving
from phalanx.state.rendezvous import LocalRendezvous, Meeting
from phalanx.state.saving import StorageError
from phalanx.training import checkpoints, folder
from phalanx.training.job import JobPayload, Summary, pack
from phalanx.training.trainer import Trainer, fit_on_rank
from tests.run_helpers import records, short_config, short_run
from tests.state.test_lock import other_process

MODEL, DATA = "gpt2", "synthetic:7"
OPTIONS: dict[str, Any] = {"steps": 4, "checkpoint_every": 1, "keep_checkpoints": 3, "export": False}


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("plan", ["", "pp=2,mb=2"], ids=["one rank", "two ranks"])
def test_a_second_run_in_a_folder_is_refused_before_anything_is_prepared(tmp_path: Path, plan: str):
    process = other_process(tmp_path)
    try:
        with pytest.raises(ConfigError, match=rf"in use by process {process.pid} on"):
            short_run(MODEL, DATA, tmp_path, plan=plan)
    finally:
        process.kill()
        process.wait()
    assert os.listdir(tmp_path) == [".lock"]


def test_resume_auto_passes_over_damaged_checkpoints_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    whole = short_run(MODEL, DATA, tmp_path, **OPTIONS)
    (newest, second, third) = folders.find(tmp_path / "checkpoints")
    flip(newest / "tensors-00000.safetensors")
    (second / "COMPLETE").write_text("{}")
    again = short_run(MODEL, DATA, tmp_path, **{**OPTIONS, "resume": "auto", "progress": "plain"})
    shown = "".join(capsys.readouterr())
    assert f"{newest} cannot be used: tensors-00000.safetensors is corrupt" in shown
    assert f"{second} cannot be used: its COMPLETE file is damaged" in shown
    assert shown.count(f"going on from {third.name} instead") == 2
    assert again.losses == whole.losses[2:]


def test_resume_auto_never_begins_again_where_there_were_checkpoints(tmp_path: Path):
    short_run(MODEL, DATA, tmp_path, **OPTIONS)
    for path in folders.find(tmp_path / "checkpoints"):
        (path / "state.json").unlink()
    with pytest.raises(CheckpointError, match=r"none can be used:(\n  .*state.json is missing){3}\n.*--out"):
        short_run(MODEL, DATA, tmp_path, resume="auto", **OPTIONS)
    for resume in ("never", "auto"):
        with pytest.raises(PhalanxError, match=r"already holds checkpoints|none can be used"):
            short_run(MODEL, DATA, tmp_path, resume=resume, **OPTIONS)
    shutil.rmtree(tmp_path / "checkpoints")
    (tmp_path / "checkpoints").symlink_to(tmp_path / "unmounted")
    with pytest.raises(CheckpointError, match="cannot be read: it is a link that points to nothing"):
        short_run(MODEL, DATA, tmp_path, resume="auto", **OPTIONS)


def test_what_killed_runs_left_is_swept(tmp_path: Path):
    left = [".export.writing", ".export.replaced", "checkpoints/.step-00000009.abcd.writing"]
    for name in left:
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "part").write_text("half")
    (tmp_path / ".secret-0123").write_text("")
    short_run(MODEL, DATA, tmp_path, **OPTIONS)
    there = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")}
    assert not {name for name in there if name.split("/")[-1].startswith(".")}
    assert (tmp_path / "export" / "part").read_text() == "half"  # an export that had stepped aside is back


def together(world: int, action: Callable[[Meeting], Any]) -> list[Any]:
    """What each of several ranks, which are threads, gets from an action with its seat in a meeting."""
    board: dict[str, str] = {}
    found: dict[int, Any] = {}

    def run(rank: int) -> None:
        try:
            found[rank] = action(Meeting(rank, world, LocalRendezvous(rank, board), timeout=20, key="start"))
        except Exception as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[rank] for rank in range(world)]


@pytest.fixture
def many_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    monkeypatch.setattr(saving, "SHARD_BYTES", 4000)
    tensors = [(f"model/{number}", torch.full((1000,), float(number))) for number in range(12)]
    return [checkpoint.save(tmp_path, step, tensors, {}, keep=2) for step in (1, 2)]


def test_ranks_verify_a_checkpoint_together_each_a_part_of_it(many_files: list[Path], monkeypatch: pytest.MonkeyPatch):
    read: list[str] = []
    checksum_fault = folders._checksum_fault
    monkeypatch.setattr(folders, "_checksum_fault", lambda path, e: read.append(path.name) or checksum_fault(path, e))
    opened = together(3, lambda meeting: checkpoint.open_newest(many_files[1].parent, meeting, print))
    assert {found.path for found in opened} == {many_files[1]}
    assert sorted(read) == sorted(json.loads((many_files[1] / "COMPLETE").read_text())["files"])
    sizes = {path.name: path.stat().st_size for path in many_files[1].iterdir() if path.name != "COMPLETE"}
    loads = [sum(sizes[name] for name in share) for share in folders._shares(sizes, 3)]
    assert max(loads) - min(loads) <= max(sizes.values())


@pytest.mark.parametrize("file", range(12))
def test_a_fault_that_one_rank_finds_all_ranks_pass_over(many_files: list[Path], file: int):
    flip(many_files[1] / f"tensors-{file:05}.safetensors")
    said: list[str] = []
    folder = many_files[1].parent
    opened = together(4, lambda meeting: checkpoint.open_newest(folder, meeting, said.append))
    assert {found.path for found in opened} == {many_files[0]}
    assert len(said) == 4 and len(set(said)) == 1 and f"tensors-{file:05}.safetensors is corrupt" in said[0]
    refused = together(2, lambda meeting: checkpoint.open_together(many_files[1], meeting))
    assert all(isinstance(error, CheckpointError) and str(many_files[0]) in error.hint for error in refused)


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Within it this process can write no file beyond a size: the kernel refuses, as it does when a disk is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_checkpoint_that_the_kernel_refuses_leaves_the_one_before(tmp_path: Path):
    pieces = [("model/w", torch.ones(10**6))]
    good = checkpoint.save(tmp_path, 1, pieces, {}, keep=1)
    with largest_file(10**6), pytest.raises(StorageError, match=r"could not save .*File too large.*\n.*are intact"):
        checkpoint.save(tmp_path, 2, pieces, {}, keep=1)
    assert os.listdir(tmp_path) == [good.name] and checkpoint.open(good).step == 1


def test_a_log_on_a_full_disk_loses_records_and_tells_how_many(tmp_path: Path):
    with RunLog(tmp_path, rank=0) as log:
        with largest_file(1000):
            for step in range(100):
                log.write("step", step=step)
        log.write("end")
    found = read_log(log.path)
    steps = [record["step"] for record in found if record["kind"] == "step"]
    assert steps == list(range(len(steps))) and found[-2]["records"] == 100 - len(steps) and found[-1]["kind"] == "end"


class FullDisk:
    """A disk that refuses the saves with these numbers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, refused: Callable[[int], bool]) -> None:
        self.saves = 0
        begin = folders.begin

        def counted(folder: Path, step: int) -> Path:
            self.saves += 1
            if refused(self.saves):
                raise OSError(28, "No space left on device")
            return begin(folder, step)

        monkeypatch.setattr(folders, "begin", counted)
        monkeypatch.setattr(checkpoints, "_TRY_AGAIN_SECONDS", 0.01)


def test_training_goes_on_while_the_disk_is_full_and_says_so_at_that_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    FullDisk(monkeypatch, lambda number: number in (2, 3))
    result = short_run(MODEL, DATA, tmp_path, **{**OPTIONS, "progress": "plain"})
    shown = "".join(capsys.readouterr())
    assert [record["step"] for record in records(tmp_path, "not_saved")] == [2, 3]
    for step in (2, 3):
        assert f"step {step}: could not save the checkpoint {tmp_path}/checkpoints/step-0000000{step}" in shown
    assert shown.count("No space left on device; the newest checkpoint is") == 2
    assert shown.count("training goes on and will save again") == 2
    assert result.steps == 4 and checkpoint.open(result.checkpoint).step == 4


def with_free_memory(context: RankContext, free: int | None, payload: JobPayload) -> Summary:
    """A rank's part of a run on a host that has so many bytes free."""
    given = folder.free_main_memory
    folder.free_main_memory = lambda: free
    try:
        return fit_on_rank(context, payload)
    finally:
        folder.free_main_memory = given


@pytest.mark.parametrize("fits", [True, False])
def test_the_ranks_of_a_run_share_what_their_host_has_free_and_no_others_do(
    pool: WorkerPool, tmp_path: Path, fits: bool
) -> None:
    def stored(free: int | None, out: Path) -> tuple[int, bool]:
        options = {**OPTIONS, "plan": "dp=2", "device": "cpu", "steps": 1}
        with pack(Trainer(MODEL, DATA, short_config(out, **options)).job) as payload:
            pool.run(with_free_memory, free, payload, world=2)
        (record,) = records(out, "checkpoint")
        return record["copied_bytes"], record["in_background"]

    whole, in_background = stored(None, tmp_path / "unlimited")
    assert in_background
    # For each of two ranks a tenth more than its copies take, or a tenth less.
    _, in_background = stored(int(2 * whole * (1.1 if fits else 0.9) / 0.9), tmp_path / "limited")
    assert in_background == fits


def test_the_last_checkpoint_is_tried_until_there_is_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    disk = FullDisk(monkeypatch, lambda number: 4 <= number < 7)
    result = short_run(MODEL, DATA, tmp_path, **OPTIONS)
    assert disk.saves == 7 and checkpoint.open(result.checkpoint).step == 4
    assert [record["step"] for record in records(tmp_path, "not_saved")] == [4, 4, 4]


def test_a_disk_that_stays_full_ends_the_run_with_what_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    FullDisk(monkeypatch, lambda number: number >= 3)
    monkeypatch.setattr(checkpoints, "_TRIES", 2)
    with pytest.raises(CheckpointError, match=r"last checkpoint could not be saved .*\n.*step-00000002; make room"):
        short_run(MODEL, DATA, tmp_path, **OPTIONS)


def test_an_export_that_the_disk_refuses_points_to_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(huggingface, "_write_settings", full)
    options = {**OPTIONS, "export": True, "checkpoint_every": 0}
    with pytest.raises(CheckpointError, match=r"could not be exported .*No space left.*\n.*--resume auto"):
        short_run(MODEL, DATA, tmp_path, **options)
    assert not (tmp_path / "export").exists() and not (tmp_path / ".export.writing").exists()
    monkeypatch.undo()
    assert short_run(MODEL, DATA, tmp_path, resume="auto", **options).export


def test_a_run_that_never_saves_still_exports(tmp_path: Path):
    result = short_run("phalanx-demo", "synthetic:8", tmp_path, steps=2, checkpoint_every="never")
    assert result.checkpoint is None and result.export is not None and (result.export / "model.safetensors").is_file()
    assert not list((tmp_path / "checkpoints").glob("step-*"))
    with pytest.raises(PhalanxError, match="the run wrote no checkpoint") as caught:
        result.module()
    assert str(result.export) in caught.value.hint


def test_a_module_in_memory_needs_its_last_checkpoint(tmp_path: Path):
    with pytest.raises(ConfigError, match="a module gets its trained values from the last checkpoint"):
        short_run(torch.nn.Linear(2, 2), "synthetic:8", tmp_path, checkpoint_every="never")
    with pytest.raises(ConfigError, match="checkpoint_every"):
        RunConfig.create(checkpoint_every="sometimes")
