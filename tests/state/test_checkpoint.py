from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from phalanx.errors import CheckpointError
from phalanx.state import checkpoint, saving
from phalanx.state.background import AsyncSaver
from phalanx.state.layout import Box
from phalanx.state.tensor_files import checksum

STATE = {"samples": 640, "config": {"model": "gpt2"}, "data": {"epoch": 1}}


def tensors(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {
        "model/w": torch.randn(6, 5, generator=generator).bfloat16(),
        "master/w": torch.randn(6, 5, generator=generator).t(),
        "optimizer/exp_avg/w": torch.randn(40, generator=generator),
        "optimizer/step/w": torch.tensor(float(step)),
        "optimizer/empty/w": torch.empty(0, 3),
        "model/flags": torch.tensor([True, False, True]),
    }


def save(folder: Path, step: int, keep: int = 3) -> Path:
    return checkpoint.save(folder, step, tensors(step).items(), STATE, keep)


def assert_good(path: Path, step: int) -> None:
    opened = checkpoint.open(path)
    assert opened.step == step and opened.state == STATE
    for name, expected in tensors(step).items():
        assert torch.equal(opened.read(name), expected), name


@pytest.fixture
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "SHARD_BYTES", 150)


def test_what_was_saved_is_read_back(tmp_path: Path, small_shards: None) -> None:
    path = save(tmp_path / "run" / "checkpoints", 100)
    assert path.name == "step-00000100"
    assert len(list(path.glob("tensors-*.safetensors"))) > 1
    assert_good(path, 100)
    opened = checkpoint.open(path)
    assert opened.names() == tuple(tensors(100))
    assert opened.shape("master/w") == (5, 6) and opened.dtype("model/w") == "bfloat16"


def test_only_a_box_is_read_when_asked_for(tmp_path: Path) -> None:
    opened = checkpoint.open(save(tmp_path, 1))
    box = Box((1, 2), (3, 2))
    part = opened.read("master/w", box)
    assert torch.equal(part, tensors(1)["master/w"][box.slices()])
    assert part.untyped_storage().nbytes() == box.numel * 4


def test_tensors_are_written_one_at_a_time(tmp_path: Path) -> None:
    def stream() -> Iterator[tuple[str, Tensor]]:
        for i in range(5):
            tensor = torch.full((1000,), float(i))
            yield f"model/{i}", tensor
            tensor.fill_(-1)  # what was yielded must be on its way to the disk by now

    opened = checkpoint.open(checkpoint.save(tmp_path, 1, stream(), STATE, keep=1))
    assert [opened.read(f"model/{i}")[0].item() for i in range(5)] == [0, 1, 2, 3, 4]


def test_those_written_last_are_kept_whatever_their_step_and_the_rest_pruned(tmp_path: Path) -> None:
    for step in (1, 2, 10, 3):
        save(tmp_path, step, keep=2)
    assert [path.name for path in checkpoint.find(tmp_path)] == ["step-00000003", "step-00000010"]
    assert sorted(os.listdir(tmp_path)) == ["step-00000003", "step-00000010"]
    assert checkpoint.latest(tmp_path) == tmp_path / "step-00000003"


@pytest.mark.parametrize("order", [(9, 5, 1), (5, 9, 1), (1, 9, 5), (300, 200, 100, 150)])
def test_the_checkpoint_just_written_is_never_pruned(tmp_path: Path, order: tuple[int, ...]) -> None:
    """As after going on from an old checkpoint, beside newer ones of the way that was left."""
    for number, step in enumerate(order):
        written = save(tmp_path, step, keep=1 + number % 2)
        assert_good(written, step)
        assert checkpoint.latest(tmp_path) == written


def test_the_order_of_writing_holds_when_the_clock_is_set_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time_ns", lambda: 10**18)
    save(tmp_path, 2)
    monkeypatch.setattr(time, "time_ns", lambda: 10**17)
    assert [path.name[-1] for path in (save(tmp_path, 3), *checkpoint.find(tmp_path))] == ["3", "3", "2"]


def test_checkpoints_without_a_time_of_writing_are_older_and_go_by_their_step(tmp_path: Path) -> None:
    for step in (7, 2, 5):
        marker = save(tmp_path, step) / "COMPLETE"
        content = json.loads(marker.read_text())
        content.pop("written")
        marker.write_text(json.dumps(content))
    save(tmp_path, 1, keep=3)
    assert [path.name[-1] for path in checkpoint.find(tmp_path)] == ["1", "7", "5"]


def test_of_a_linked_checkpoint_only_the_link_is_removed(tmp_path: Path) -> None:
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    os.rename(save(run, 1), elsewhere)
    (run / "step-00000001").symlink_to(elsewhere)
    (run / "step-00000003").symlink_to(tmp_path / "gone")  # a link to nothing in the way of the next
    assert_good(run / "step-00000001", 1)
    assert_good(save(run, 3, keep=2), 3)
    save(run, 4, keep=2)
    assert sorted(os.listdir(run)) == ["step-00000003", "step-00000004"]
    assert_good(elsewhere, 1)


def test_a_file_in_the_way_of_a_checkpoint_gives_way(tmp_path: Path) -> None:
    (tmp_path / "step-00000002").write_text("notes")
    assert_good(save(tmp_path, 2), 2)


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    save(tmp_path, 5)
    checkpoint.save(tmp_path, 5, [("model/w", torch.ones(3))], {"again": True}, keep=1)
    opened = checkpoint.open(tmp_path / "step-00000005")
    assert opened.state == {"again": True} and opened.names() == ("model/w",)
    assert os.listdir(tmp_path) == ["step-00000005"]


def test_a_folder_without_checkpoints_has_no_latest(tmp_path: Path) -> None:
    (tmp_path / "step-notes").mkdir()
    assert checkpoint.find(tmp_path) == [] and checkpoint.latest(tmp_path / "nowhere") is None


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def change_marker(path: Path, **changes: object) -> None:
    marker = json.loads((path / "COMPLETE").read_text())
    marker["files"]["state.json"] |= changes
    (path / "COMPLETE").write_text(json.dumps(marker))


def lead_out(path: Path, name: str = "../step-00000001/state.json") -> None:
    marker = json.loads((path / "COMPLETE").read_text())
    marker["files"][name] = marker["files"]["state.json"]
    (path / "COMPLETE").write_text(json.dumps(marker))


def change_index(path: Path, **changes: object) -> None:
    """As who writes a whole checkpoint can: the checksum of the index is right."""
    record = json.loads((path / "state.json").read_text())
    entry = record["tensors"]["master/w"]
    (entry if "dtype" in changes else entry["pieces"][0]).update(changes)
    (path / "state.json").write_text(json.dumps(record))
    change_marker(path, size=(path / "state.json").stat().st_size, sha256=checksum(path / "state.json"))


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "a changed value": (lambda p: flip(p / "tensors-00000.safetensors", -1), r"tensors-00000.safetensors is corrupt"),
    "a changed header": (lambda p: flip(p / "tensors-00000.safetensors", 40), r"tensors-00000.safetensors is corrupt"),
    "a changed counter": (lambda p: flip(p / "state.json", 20), r"state.json is corrupt"),
    "a short file": (lambda p: truncate(p / "tensors-00000.safetensors"), r"has \d+ bytes instead of \d+"),
    "a missing file": (lambda p: (p / "tensors-00000.safetensors").unlink(), r"tensors-00000.safetensors is missing"),
    "no marker": (lambda p: (p / "COMPLETE").unlink(), r"incomplete \(no COMPLETE file\)"),
    "a bad marker": (lambda p: (p / "COMPLETE").write_text("{"), r"its COMPLETE file is damaged"),
    "an empty marker": (lambda p: (p / "COMPLETE").write_text('{"files": {}}'), r"it names no state.json"),
    "a marker of lists": (lambda p: (p / "COMPLETE").write_text('{"files": []}'), r"COMPLETE file is damaged \(files"),
    "a marker that nests": (lambda p: (p / "COMPLETE").write_text("[" * 10**5), r"COMPLETE file is damaged"),
    "negative sizes": (lambda p: change_marker(p, size=-1), r"COMPLETE file is damaged"),
    "sizes as texts": (lambda p: change_marker(p, size="9"), r"COMPLETE file is damaged"),
    "a marker that leads out": (lambda p: lead_out(p), r"names '\.\./[^']*', which is not a file of this folder"),
    "a marker of root": (lambda p: lead_out(p, "/etc/passwd"), r"names '/etc/passwd', which is not a file of this"),
    "an index that leads out": (
        lambda p: change_index(p, file="../x"),
        r"index is damaged .*not a file of this folder",
    ),
    "pieces that miss some": (lambda p: change_index(p, shape=[5, 5]), r"index is damaged \(owners hold 25 of the 30"),
    "negative boxes": (lambda p: change_index(p, offset=[-1, 0]), r"index is damaged"),
    "boxes of other dims": (lambda p: change_index(p, offset=[0]), r"index is damaged"),
    "an unknown dtype": (lambda p: change_index(p, dtype="load"), r"index is damaged"),
    "no folder": (lambda p: shutil.rmtree(p), r"there is no such folder"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_refused_and_the_previous_good_one_offered(tmp_path: Path, damage: str) -> None:
    good, also_bad, bad = save(tmp_path, 1), save(tmp_path, 2), save(tmp_path, 3)
    flip(also_bad / "tensors-00000.safetensors", -1)
    apply, message = DAMAGE[damage]
    apply(bad)
    with pytest.raises(CheckpointError, match=message) as caught:
        checkpoint.open(bad)
    assert caught.value.hint == f"the newest good checkpoint is {good}; resume from that one"


def test_when_no_other_checkpoint_is_good_the_error_says_so(tmp_path: Path) -> None:
    flip(save(tmp_path, 1) / "state.json", 3)
    with pytest.raises(CheckpointError, match=r"no other good checkpoint .* start without resuming"):
        checkpoint.open(tmp_path / "step-00000001")


def test_the_folder_of_a_run_is_told_from_a_broken_checkpoint(tmp_path: Path):
    good = save(tmp_path / "run" / "checkpoints", 3)
    with pytest.raises(CheckpointError, match="is the folder of a run, not a checkpoint") as caught:
        checkpoint.open(tmp_path / "run")
    assert caught.value.hint == f"the newest good checkpoint is {good}; resume from that one"


def test_a_folder_of_checkpoints_is_told_from_one_of_them(tmp_path: Path):
    good = save(tmp_path / "run" / "checkpoints", 3)
    with pytest.raises(CheckpointError, match="is a folder of checkpoints, not one of them") as caught:
        checkpoint.open(tmp_path / "run" / "checkpoints")
    assert caught.value.hint == f"the newest good checkpoint is {good}; resume from that one"


@pytest.mark.parametrize("is_link", [False, True])
def test_what_is_no_folder_is_no_checkpoint_and_another_is_offered(is_link: bool, tmp_path: Path):
    """A file, or a link that points to nothing."""
    good, given = save(tmp_path, 3), tmp_path / "given"
    given.symlink_to("nowhere") if is_link else given.write_text("weights")
    with pytest.raises(CheckpointError, match="there is no such folder") as caught:
        checkpoint.open(given)
    assert caught.value.hint == f"the newest good checkpoint is {good}; resume from that one"


def test_contents_are_trusted_when_asked_not_to_verify(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    flip(path / "tensors-00000.safetensors", -1)
    assert checkpoint.open(path, verify=False).step == 1


def test_a_newer_format_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "FORMAT", 3)
    path = save(tmp_path, 1)
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="has format 3; this version reads formats up to 2"):
        checkpoint.open(path)


def test_a_folder_of_format_1_still_opens(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    record = json.loads((path / "state.json").read_text())
    for entry in record["tensors"].values():
        pieces = entry.pop("pieces")
        entry["file"] = pieces[0]["file"] if pieces else None
    # Format 1 stored empty tensors too; these files were written without.
    record["tensors"].pop("optimizer/empty/w")
    (path / "state.json").write_text(json.dumps(record | {"format": 1}))
    marker = json.loads((path / "COMPLETE").read_text())
    marker["files"]["state.json"] = {
        "size": (path / "state.json").stat().st_size, "start": 0, "sha256": checksum(path / "state.json"),
    }  # fmt: skip
    (path / "COMPLETE").write_text(json.dumps(marker))
    opened = checkpoint.open(path)
    assert torch.equal(opened.read("master/w"), tensors(1)["master/w"])
    assert opened.read("optimizer/step/w").item() == 1.0 and opened.dtype("model/w") == "bfloat16"


def test_a_box_outside_the_tensor_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"is not inside 'master/w' of shape \[5, 6\]"):
        checkpoint.open(save(tmp_path, 1)).read("master/w", Box((3, 0), (3, 6)))


def test_a_tensor_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no tensor 'model/other'"):
        checkpoint.open(save(tmp_path, 1)).read("model/other")


def test_a_full_disk_leaves_the_earlier_checkpoint_and_no_rubbish(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1)

    def no_space(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(CheckpointError, match=r"could not save .*step-00000002: .*No space left.*\n.*are intact"):
        save(tmp_path, 2)
    assert os.listdir(tmp_path) == ["step-00000001"]
    assert_good(tmp_path / "step-00000001", 1)


def run_and_kill(body: Callable[[], object]) -> int:
    """Runs `body` in a forked process, which is expected to be killed inside it; returns how it ended."""
    child = os.fork()
    if child == 0:
        try:
            body()
        finally:
            os._exit(0)
    return os.waitpid(child, 0)[1]


def kill_at_call(owner: object, name: str, number: int) -> None:
    """Makes this process die by SIGKILL when the function is entered for the given time."""
    original, calls = getattr(owner, name), iter(range(number))

    def wrapped(*args: object, **kwargs: object) -> object:
        if next(calls, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)

    setattr(owner, name, wrapped)


MOMENTS = [
    *[(os, "fsync", n) for n in range(8)],
    (json, "dumps", 0),  # the header of a file of tensors
    (json, "dumps", 18),  # an index that is open and still empty
    (json, "dumps", 20),  # the marker's
    (os, "rename", 0),
    (os, "rename", 1),
    (shutil, "rmtree", 0),
    (os, "unlink", 0),
    (os, "unlink", 2),
]


@pytest.mark.parametrize("again", [False, True], ids=["new step", "same step"])
@pytest.mark.parametrize(("owner", "name", "number"), MOMENTS, ids=lambda value: str(getattr(value, "__name__", value)))
def test_a_kill_at_any_moment_leaves_a_good_checkpoint(
    tmp_path: Path, small_shards: None, owner: object, name: str, number: int, again: bool
) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2)

    def die_saving() -> None:
        kill_at_call(owner, name, number)
        save(tmp_path, 2 if again else 3, keep=1)

    status = run_and_kill(die_saving)
    assert os.WIFSIGNALED(status), "the save was over before the moment came"
    found = checkpoint.find(tmp_path)
    assert found
    for path in found:
        assert_good(path, checkpoint.open(path).step)
    assert checkpoint.open(found[0]).step >= 2
    assert_good(save(tmp_path, 4, keep=1), 4)
    assert os.listdir(tmp_path) == ["step-00000004"]


def test_a_kill_between_two_tensors_leaves_earlier_checkpoints(tmp_path: Path, small_shards: None) -> None:
    save(tmp_path, 1)

    def dying() -> Iterator[tuple[str, Tensor]]:
        for count, item in enumerate(tensors(2).items()):
            if count == 4:
                os.kill(os.getpid(), signal.SIGKILL)
            yield item

    status = run_and_kill(lambda: checkpoint.save(tmp_path, 2, dying(), STATE, keep=1))
    assert os.WIFSIGNALED(status)
    assert [path.name for path in checkpoint.find(tmp_path)] == ["step-00000001"]
    assert_good(tmp_path / "step-00000001", 1)


def test_a_background_save_holds_the_values_of_the_moment_it_was_asked_for(tmp_path: Path) -> None:
    saver, values, state = AsyncSaver(tmp_path, keep=2), torch.ones(1000), {"samples": [1]}
    saver.save(1, [("model/w", values)], state)
    values.zero_()
    state["samples"].append(2)
    saver.save(2, [("model/w", values)], state)
    assert saver.wait() == tmp_path / "step-00000002"
    first, second = checkpoint.open(tmp_path / "step-00000001"), checkpoint.open(tmp_path / "step-00000002")
    assert (first.read("model/w") == 1).all() and first.state == {"samples": [1]}
    assert (second.read("model/w") == 0).all() and second.state == {"samples": [1, 2]}


def test_an_error_in_the_background_surfaces_at_the_next_call(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    saver = AsyncSaver(blocked / "checkpoints", keep=1)
    saver.save(1, [("model/w", torch.ones(1))], {})
    with pytest.raises(CheckpointError, match="could not save the checkpoint"):
        saver.save(2, [("model/w", torch.ones(1))], {})
    assert saver.wait() is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_background_save_from_a_gpu_holds_the_values_of_the_moment(tmp_path: Path) -> None:
    saver, values = AsyncSaver(tmp_path, keep=1), torch.ones(1 << 22, device="cuda")
    saver.save(1, [("model/w", values), ("model/on_cpu", torch.ones(3))], {})
    values.zero_()
    path = saver.wait()
    assert path is not None and (checkpoint.open(path).read("model/w") == 1).all()
