"""Checkpoints and exports in remote storage, for which memory:// stands; and torch.distributed.checkpoint folders."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path
from threading import Semaphore
from typing import Any

import fsspec
import pytest
import torch

from phalanx.data.tokenizer import ByteTokenizer
from phalanx.errors import CheckpointError, ConfigError
from phalanx.launch.context import RankContext
from phalanx.state import checkpoint
from phalanx.state.dcp import is_dcp, write_dcp
from phalanx.state.remote import Remote, fetch_folder, fetch_newest, local_copy, open_remote, refuse_used
from phalanx.state.snapshot import Mark, Snapshot
from phalanx.training.folder import RunFolder
from tests.run_helpers import losses, padded_samples, short_config, short_run

MODEL = "phalanx-demo"


@pytest.fixture
def storage():
    """An empty memory://."""
    system = fsspec.filesystem("memory")
    system.store.clear()
    system.pseudo_dirs[:] = [""]
    return system


@pytest.fixture(scope="module")
def samples() -> list[dict[str, Any]]:
    return padded_samples(24, vocabulary=90)


def names(system: Any, path: str) -> set[str]:
    return {entry.rpartition("/")[2] for entry in system.ls(path, detail=False)}


def test_a_run_goes_on_from_its_remote_copy_as_if_it_had_never_stopped(storage, samples, tmp_path: Path, monkeypatch):
    options: dict[str, Any] = {"lr_steps": 6, "checkpoint_every": 1, "remote": "memory://runs/a"}
    short_run(MODEL, samples, tmp_path / "whole", steps=6, lr_steps=6, export=False)
    short_run(MODEL, samples, tmp_path / "a", steps=3, **options)
    there = names(storage, "/runs/a/checkpoints")
    assert "step-00000003" in there
    assert there <= {"step-00000002", "step-00000003"}, "pruned as here"
    assert {"config.json", "model.safetensors"} <= names(storage, "/runs/a/export")
    assert {"config.yaml", "plan.json", "log-rank0.jsonl"} <= names(storage, "/runs/a")
    with pytest.raises(ConfigError, match=r"remote = 'memory://runs/a' already holds checkpoints(.|\n)*--resume auto"):
        short_run(MODEL, samples, tmp_path / "b", steps=3, **options)
    short_run(MODEL, samples, tmp_path / "b", steps=6, resume="auto", **options, export=False)
    short_run(
        MODEL, samples, tmp_path / "c", steps=6, lr_steps=6, resume="memory://runs/a/checkpoints/step-00000005",
        export=False,
    )  # fmt: skip
    whole = losses(tmp_path / "whole")
    assert losses(tmp_path / "b") == {step: whole[step] for step in (4, 5, 6)}
    assert losses(tmp_path / "c") == {6: whole[6]}
    monkeypatch.setenv("PHALANX_CACHE", str(tmp_path / "cache"))
    short_run("memory://runs/a/export", samples, tmp_path / "d", steps=1, tiny=False, export=False)


def test_a_checkpoint_whose_copy_was_interrupted_is_passed_over(storage, tmp_path: Path):
    storage.pipe("/runs/a/checkpoints/step-00000009/state.json", b"{}")
    assert fetch_newest("memory://runs/a", tmp_path) is None
    assert fetch_newest("memory://runs/none", tmp_path) is None


def saved(run: Path, step: int, value: float) -> Path:
    """A checkpoint of a run without settings."""
    return checkpoint.save(run / "checkpoints", step, [("model/w", torch.full((9,), value))], {"value": value}, keep=9)


def test_a_checkpoint_that_is_copied_over_one_of_its_step_is_none_until_it_is_whole(storage, tmp_path, monkeypatch):
    run, said, real = tmp_path / "a", list[str](), type(storage).put_file

    def put_file(self: Any, source: str, target: str) -> None:
        if broken and target.endswith("safetensors"):
            raise ConnectionError("gone")
        real(self, source, target)

    monkeypatch.setattr(type(storage), "put_file", put_file)
    for broken, step in ((False, 2), (False, 4), (True, 4)):
        remote = Remote("memory://runs/a", run, said.append)
        remote.checkpoint(saved(run, step, float(broken)))
        remote.close()
    assert len(said) == 1
    assert fetch_newest("memory://runs/a", tmp_path / "b") == "step-00000002"


def test_checkpoints_that_come_faster_than_they_are_copied_leave_a_whole_one_there(storage, tmp_path, monkeypatch):
    """While one is copied the next is written, and it is pruned here itself."""
    run, said, real, begun, go_on = tmp_path / "a", list[str](), type(storage).put_file, Semaphore(0), Semaphore(0)

    def put_file(self: Any, source: str, target: str) -> None:
        if target.endswith("state.json"):
            begun.release()
            go_on.acquire(timeout=60)
        real(self, source, target)

    monkeypatch.setattr(type(storage), "put_file", put_file)
    remote = Remote("memory://runs/a", run, said.append)
    remote.checkpoint(first := saved(run, 1, 1.0))
    assert begun.acquire(timeout=60)
    for step in (2, 3):
        remote.checkpoint(saved(run, step, 1.0))
    shutil.rmtree(first)
    go_on.release()
    assert begun.acquire(timeout=60)
    assert fetch_newest("memory://runs/a", tmp_path / "b") == "step-00000001", "it stays until the next is whole"
    go_on.release()
    remote.close()
    assert said == []
    assert names(storage, "/runs/a/checkpoints") == {"step-00000003"}, "the one between was passed over"
    assert not (run / ".copying").exists()


def test_the_run_folder_itself_is_no_remote_storage(tmp_path: Path):
    with pytest.raises(ConfigError, match="is the run folder itself"):
        short_run(MODEL, "synthetic", tmp_path / "a", remote=f"file://{tmp_path}/a")


def test_a_checkpoint_that_is_damaged_there_is_passed_over(storage, tmp_path: Path):
    run, said = tmp_path / "a", list[str]()
    for step in (2, 4):
        storage.put(str(saved(run, step, 1.0)), f"/runs/a/checkpoints/step-{step:08}", recursive=True)
    storage.pipe("/runs/a/checkpoints/step-00000004/state.json", b"{}")
    assert fetch_newest("memory://runs/a", tmp_path / "b", said.append) == "step-00000002"
    assert len(said) == 1
    assert "step-00000004 cannot be used: state.json has 2 bytes" in said[0]
    storage.rm("/runs/a/checkpoints/step-00000002", recursive=True)
    with pytest.raises(CheckpointError, match=r"none can be used(.|\n)*step-00000004"):
        fetch_newest("memory://runs/a", tmp_path / "c")
    assert not list((tmp_path / "c" / "checkpoints").iterdir())


def test_a_checkpoint_that_is_named_there_is_fetched_unless_the_same_is_here(storage, tmp_path: Path):
    for run, value in (("a", 1.0), ("b", 2.0)):
        storage.put(str(saved(tmp_path / run, 2, value)), f"/runs/{run}/checkpoints/step-00000002", recursive=True)

    def taken(run: str) -> tuple[float, list[str]]:
        said: list[str] = []
        config = short_config(tmp_path / "b", resume=f"memory://runs/{run}/checkpoints/step-00000002")
        folder = RunFolder(tmp_path / "b", config, RankContext.alone())
        with contextlib.ExitStack() as stack:
            folder.take(stack, said.append)
            found = folder.to_resume(said.append)
        assert found is not None
        return found.state["value"], said

    fetched = ["fetched memory://runs/b/checkpoints/step-00000002"]
    assert taken("b") == (2.0, [])
    (here := next(tmp_path.glob("b/checkpoints/*/*.safetensors"))).write_bytes(bytes(here.stat().st_size))
    assert taken("b") == (2.0, fetched)
    assert taken("a")[0] == 1.0, "another run's of the same name is not taken for it"
    storage.rm("/runs/a/checkpoints/step-00000002/state.json")
    with pytest.raises(CheckpointError, match=r"runs/a/\S+ cannot be used: state.json is missing"):
        (here.parent / "COMPLETE").unlink()
        taken("a")


@pytest.mark.parametrize("resume", ["auto", "path"])
def test_a_place_that_holds_checkpoints_of_another_run_is_refused(storage, tmp_path: Path, resume: str):
    copied(storage, trained(tmp_path / "a", 6))
    with pytest.raises(ConfigError, match=r"checkpoints of another run, such as (.|\n)*seed: was 0, now 7"):
        taken_up(tmp_path / "b", trained(tmp_path / "b", 2, seed=7) if resume == "path" else "auto", seed=7)
    assert names(storage, "/runs/a/checkpoints") == {"step-00000006"}
    assert not (tmp_path / "b" / "checkpoints" / "step-00000006").exists()


def test_a_run_whose_folder_is_behind_its_remote_copy_goes_on_from_there(storage, tmp_path: Path):
    trained(tmp_path / "b", 2)
    for step in (2, 4, 6):
        copied(storage, trained(tmp_path / "a", step))
    said = taken_up(tmp_path / "b", "auto")
    assert said == ["fetched step-00000006 from memory://runs/a"]
    assert names(storage, "/runs/a/checkpoints") == {"step-00000008"}, "what is behind it is pruned as here"


def test_newer_checkpoints_of_the_run_stay_where_it_goes_on_from_an_older_one(storage, tmp_path: Path):
    for step in (2, 4, 6):
        copied(storage, trained(tmp_path / "a", step))
    trained(tmp_path / "b", 4)
    assert taken_up(tmp_path / "b", tmp_path / "b" / "checkpoints" / "step-00000004") == []
    assert names(storage, "/runs/a/checkpoints") == {"step-00000006", "step-00000008"}


def test_a_rank_that_takes_over_from_rank_0_prunes_there_what_that_copied(storage, tmp_path: Path):
    run = tmp_path / "a"
    for step in (2, 4):
        copied(storage, trained(run, step))
    copied(storage, trained(tmp_path / "b", 3, seed=1))  # of another run
    folder = RunFolder(run, short_config(run, remote="memory://runs/a"), RankContext.alone())
    with contextlib.ExitStack() as stack:
        folder.take_over(stack, print)
        shutil.rmtree(run / "checkpoints" / "step-00000002")
        assert folder.remote is not None
        folder.remote.checkpoint(trained(run, 6))
    assert names(storage, "/runs/a/checkpoints") == {"step-00000003", "step-00000004", "step-00000006"}


def trained(run: Path, step: int, seed: int = 0) -> Path:
    """A checkpoint of a run with settings."""
    config = short_config(run, seed=seed).model_dump(mode="json")
    state = Snapshot(config, Mark("m", "1"), Mark("d", "2"), 6, step=step).to_json()
    return checkpoint.save(run / "checkpoints", step, [("model/w", torch.zeros(9))], state, keep=9)


def copied(storage: Any, path: Path) -> None:
    storage.put(str(path), f"/runs/a/checkpoints/{path.name}", recursive=True)


def taken_up(run: Path, resume: Path | str, seed: int = 0) -> list[str]:
    """What is said when a run is continued up to step 8, and keeps one checkpoint."""
    said: list[str] = []
    folder = RunFolder(
        run, short_config(run, resume=str(resume), remote="memory://runs/a", seed=seed), RankContext.alone()
    )
    if resume == "auto" and seed:
        trained(run, 2, seed)
    with contextlib.ExitStack() as stack:
        folder.take(stack, said.append)
        for path in checkpoint.find(run / "checkpoints"):
            shutil.rmtree(path)
        assert folder.remote is not None
        folder.remote.checkpoint(trained(run, 8, seed))
    return said


def test_what_cannot_be_copied_is_said_and_the_run_goes_on(storage, tmp_path: Path, monkeypatch):
    said: list[str] = []
    (tmp_path / "config.yaml").write_text("x")

    def refuse(*args: Any, **options: Any) -> None:
        raise PermissionError("no")

    remote = Remote("memory://runs/a", tmp_path, said.append)
    monkeypatch.setattr(type(storage), "put_file", refuse)
    remote.copy("config.yaml", "export")
    remote.close()
    assert said == ["not copied to memory://runs/a: PermissionError: no; what is here is complete"]


def test_a_folder_that_is_not_there_is_named_and_leaves_nothing_behind(storage, tmp_path: Path, monkeypatch):
    with pytest.raises(CheckpointError, match=r"memory://none cannot be fetched(.|\n)*check the name"):
        fetch_folder("memory://none", tmp_path / "a")
    assert not list(tmp_path.iterdir())
    monkeypatch.setenv("PHALANX_CACHE", str(tmp_path))
    with pytest.raises(CheckpointError, match="cannot be fetched"):
        local_copy("memory://none")


def test_a_url_that_nobody_knows_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"'nowhere://x' cannot be reached(.|\n)*a URL that fsspec knows"):
        open_remote("nowhere://x")
    with pytest.raises(ConfigError, match=r"remote = 'backup' is no URL(.|\n)*file:///backup/run"):
        short_run(MODEL, "synthetic", tmp_path, remote="backup")
    with pytest.raises(ConfigError, match=r"cannot be reached: ConnectionRefusedError") as refused:
        refuse_used("ftp://127.0.0.1:1/run")
    assert "can be reached from here" in refused.value.hint


def test_the_trained_model_is_exported_for_torch_distributed_checkpoint(samples, tmp_path: Path):
    result = short_run(MODEL, samples, tmp_path / "a", steps=2, export_dcp=True)
    folder = tmp_path / "a" / "export-dcp"
    assert is_dcp(folder)
    from torch.distributed.checkpoint import FileSystemReader, load

    found = {name: torch.zeros_like(parameter) for name, parameter in result.module().named_parameters()}
    load(found, storage_reader=FileSystemReader(folder), no_dist=True)
    for name, parameter in result.module().named_parameters():
        assert torch.equal(found[name], parameter), name
    again = short_run(
        str(folder), samples, tmp_path / "b", steps=1, tiny=False, export=False, lr=1e-30, weight_decay=0.0
    )
    assert all(torch.equal(found[name], parameter) for name, parameter in again.module().named_parameters())
    write_dcp(folder, found.items(), result.module().config, ByteTokenizer())
    assert (folder / "tokenizer_config.json").is_file(), "text can be read with it as it was"
    with pytest.raises(ConfigError, match="export_dcp = True would hold adapters"):
        short_run(MODEL, samples, tmp_path / "c", lora="r=2", export_dcp=True)
