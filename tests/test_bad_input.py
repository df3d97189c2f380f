"""What a user gets wrong is answered with what it was, where, and what to do; never with a traceback from inside."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import phalanx
from phalanx.cli.main import main
from phalanx.engine.engine import Engine
from phalanx.errors import CheckpointError, ConfigError, DataError, ModelError, PhalanxError, PlanError
from phalanx.model import capture
from phalanx.state import checkpoint
from tests.run_helpers import padded_samples, short_run

MODEL, DATA = "phalanx-demo", "synthetic:8"


@pytest.fixture
def no_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """These mistakes must be found before the model is captured, or an earlier capture of it read."""
    monkeypatch.setattr(capture, "_read", lambda path: pytest.fail("captured before the mistake was found"))


@pytest.mark.usefixtures("no_capture")
@pytest.mark.parametrize(
    ("arguments", "kind", "message", "hint"),
    [
        ({"model": "gpt-2"}, ModelError, "unknown model 'gpt-2'.*did you mean 'gpt2'", "download"),
        ({"data": "nowhere.txt"}, DataError, "data 'nowhere.txt' does not exist", "Give a file or folder that exists"),
        ({"data": ""}, DataError, "data '' names nothing", "give a file or folder"),
        ({"eval_data": ""}, DataError, "data '' names nothing", "give a file or folder"),
        ({"data": "stdlb"}, DataError, "data 'stdlb' does not exist", "did you mean 'stdlib'?"),
        ({"model": "nowhere"}, ModelError, "nor a hub id in the local cache\n", "phalanx inspect lists the zoo"),
        ({"data": 3}, DataError, "data is a int", "give a path"),
        ({"learning_rate": 1}, ConfigError, "unknown option 'learning_rate'", "here it is lr"),
        ({"plan": "pp=2 mb=2"}, PlanError, "'pp=2 mb=2' holds several fields", "put commas between them"),
        (
            {"lr_steps": 2, "warmup_steps": 3},
            ConfigError,
            "warmup_steps = 3 is more than lr_steps = 2",
            "between 0 and 2",
        ),
        ({"lrr": 1}, ConfigError, "unknown option 'lrr'", "did you mean 'lr'"),
        ({"plan": "mb=5"}, PlanError, "mb=5 cuts a batch of 4 samples", "use mb=4 or less"),
        ({"plan": "mb=2,schedul=gpipe"}, PlanError, "unknown field 'schedul'", "did you mean 'schedule'"),
        ({"task": "masked-lm"}, ModelError, "cannot be trained for 'masked-lm'", "choose one of these tasks"),
        ({"profile_steps": "9:10"}, ConfigError, "begins after the last of 3 steps", "between 1 and 3"),
        ({"steps": None, "warmup_steps": 50}, ConfigError, "longer than the run of 2 steps", "between 0 and 2"),
        ({"collate": lambda items: {}}, DataError, "collate was given, but data is not", "leave collate out"),
        ({"callbacks": [object()]}, ConfigError, "callback object has none of the methods", "on_start"),
    ],
)
def test_a_mistake_is_named_before_the_model_is_captured(
    arguments: dict[str, Any], kind: type[PhalanxError], message: str, hint: str, tmp_path: Path
):
    arguments = {"model": MODEL, "data": DATA, **arguments}
    with pytest.raises(kind, match=message) as info:
        short_run(arguments.pop("model"), arguments.pop("data"), tmp_path, **arguments)
    assert any(part in str(info.value) for part in hint.split("|"))


def test_a_broken_file_in_a_folder_is_named_or_skipped_as_chosen(tmp_path: Path):
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "good.txt").write_text("some words " * 100)
    (folder / "broken.txt").write_bytes(b"\xff\xfe\x00bad" * 50)
    with pytest.raises(DataError, match=r"broken\.txt"):
        short_run(MODEL, folder, tmp_path / "a")
    with pytest.warns(UserWarning, match=r"skipped 1 broken part.*broken\.txt"):
        result = short_run(MODEL, folder, tmp_path / "b", on_broken="skip", steps=1, export=False)
    assert len(result.losses) == 1


def test_an_error_that_is_not_about_memory_is_left_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def run(*arguments: Any) -> None:
        raise RuntimeError("something else")

    monkeypatch.setattr(Engine, "run", run)
    with pytest.raises(RuntimeError, match=r"^something else$"):
        short_run(MODEL, DATA, tmp_path)


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with the checkpoints of steps 1 and 2; copied where a test changes it."""
    folder = tmp_path_factory.mktemp("earlier")
    short_run(MODEL, DATA, folder, steps=2, checkpoint_every=1, export=False)
    return folder


def test_a_fresh_start_into_a_used_folder_is_refused(earlier: Path):
    with pytest.raises(ConfigError, match="already holds checkpoints, the newest step-00000002") as info:
        short_run(MODEL, DATA, earlier)
    assert "--resume auto" in info.value.hint and "--out" in info.value.hint


@pytest.mark.parametrize(
    ("changes", "lines"),
    [
        ({"seed": 7, "batch_size": 2}, ["batch_size: was 4, now 2", "seed: was 0, now 7"]),
        ({"lr": 0.5, "freeze": ("*norm*",)}, [r"freeze: was \[\], now \['\*norm\*'\]", "lr: was 0.0003, now 0.5"]),
        ({"data": "synthetic:9"}, ["data: was 'synthetic, .* 8 samples.*, now 'synthetic, .* 9 samples"]),
        ({"model": "gpt2"}, ["model: was 'phalanx-demo-tiny', now 'gpt2-tiny'"]),
    ],
)
def test_resuming_with_options_that_change_the_trajectory_lists_them(
    changes: dict[str, Any], lines: list[str], earlier: Path
):
    options = {"model": MODEL, "data": DATA, "steps": 4, "resume": "auto", **changes}
    with pytest.raises(ConfigError, match=r"cannot go on from .*step-00000002 exactly") as info:
        short_run(options.pop("model"), options.pop("data"), earlier, **options)
    for line in lines:
        assert info.match(line)
    assert "set them back" in info.value.hint


def test_resuming_a_run_that_is_already_longer_is_refused(earlier: Path):
    with pytest.raises(ConfigError, match="already trained 2 steps, more than the 1 asked for") as info:
        short_run(MODEL, DATA, earlier, steps=1, resume="auto")
    assert info.value.hint == "set steps to 2 or more"


def test_a_corrupt_checkpoint_is_refused_and_the_previous_one_offered(tmp_path: Path):
    short_run(MODEL, DATA, tmp_path, steps=2, checkpoint_every=1, export=False)
    newest, previous = checkpoint.find(tmp_path / "checkpoints")
    file = newest / "tensors-00000.safetensors"
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"tensors-00000\.safetensors is corrupt") as info:
        short_run(MODEL, DATA, tmp_path, steps=3, resume=str(newest))
    assert f"the newest good checkpoint is {previous}" in info.value.hint
    assert len(short_run(MODEL, DATA, tmp_path, steps=3, resume=str(previous), export=False).losses) == 2


def test_a_checkpoint_that_is_not_there_or_of_another_kind_is_refused(tmp_path: Path):
    with pytest.raises(CheckpointError, match="there is no such folder"):
        short_run(MODEL, DATA, tmp_path / "a", resume=str(tmp_path / "none"))
    other = checkpoint.save(tmp_path / "b", 1, [("x", torch.ones(1))], {"mine": 1}, keep=1)
    with pytest.raises(CheckpointError, match="was not written by a training run"):
        short_run(MODEL, DATA, tmp_path / "a", resume=str(other))


class Square(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return ((x * self.weight) ** 2).mean()


class NoLoss(Square):
    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight).sum().sqrt()


class Idle(Square):
    """With a parameter that the loss does not depend on."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.Parameter(torch.ones(1))


OWN = {"batch_size": 2, "steps": 2, "progress": "off", "export": False}


@pytest.mark.parametrize(
    ("model", "data", "options", "message"),
    [
        (Square(), "stdlib", {}, "'Square' takes inputs of its own, which 'stdlib' does not hold"),
        (Square(), ["a.txt"] * 99, {}, "'Square' takes inputs of its own, which a list does not hold"),
        (Square(), [{"x": torch.ones(2)}], {"tiny": True}, "tiny cannot act on a module or factory"),
        (Square(), [{"x": torch.ones(2)}], {"dropout": 0.1}, "dropout cannot be set on 'Square'"),
        (Square(), [{"x": torch.ones(2)}], {"freeze": ("*",)}, r"freeze = \['\*'\] leaves no parameter to train"),
        (Idle(), [{"x": torch.ones(2)}], {"freeze": ("weight",)}, "no trainable parameter takes part in the loss"),
        (NoLoss(), [{"x": torch.ones(2)}, {"x": 2 * torch.ones(2)}], {"plan": "mb=2"}, "depend on each other"),
        (Square, [{"x": torch.ones(2)}], {"task": "causal-lm"}, "'Square' makes has no HuggingFace configuration"),
        (lambda: 3, [{"x": torch.ones(2)}], {}, "returned an object of type int"),
    ],
)
def test_modules_of_the_users_own_are_refused_with_the_reason(
    model: Any, data: Any, options: Any, message: str, tmp_path: Path
):
    with pytest.raises(PhalanxError, match=message):
        phalanx.train(model, data, out=tmp_path, **{**OWN, **options})


class Growing(torch.utils.data.Dataset):
    """Samples whose length changes along the way."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.ones(2 if index < 2 else 3)}


def test_batches_that_change_their_shape_are_named(tmp_path: Path):
    with pytest.raises(DataError, match=r"input 'x' has shape \[2, 3\], but the model was captured for \[batch, 2\]"):
        phalanx.train(Square(), Growing(), out=tmp_path, shuffle=False, **OWN)


class Pairs(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> tuple[int, int]:
        return (index, index)


def test_items_that_are_not_dicts_need_a_collate(tmp_path: Path):
    with pytest.raises(DataError, match="a sample of the dataset is a tuple, not a dict"):
        phalanx.train(Square(), Pairs(), out=tmp_path, **OWN)


def test_a_list_of_items_that_are_not_dicts_is_trained_with_a_collate(tmp_path: Path):
    items = [(torch.full((2,), number / 4), number) for number in range(4)]
    result = phalanx.train(
        Square(), items, collate=lambda pairs: {"x": torch.stack([x for x, _ in pairs])}, out=tmp_path, **OWN
    )
    assert result.steps == 2


@pytest.mark.parametrize("names", ["a", "a, x", "x, y"])
def test_fields_that_forward_does_not_take_are_named(names: str, tmp_path: Path):
    data = [{name: torch.ones(2) for name in names.split(", ")}] * 4
    with pytest.raises(DataError, match=f"the samples hold {names}, but forward of Square takes x") as info:
        phalanx.train(Square(), data, out=tmp_path, **OWN)
    assert "as forward names its arguments" in info.value.hint


def test_evaluation_data_must_give_the_inputs_of_the_training_data(tmp_path: Path):
    ids = torch.arange(3, 15)
    names = ("input_ids", "labels", "position_ids", "document_ids")
    packed = [dict(zip(names, (ids, ids, torch.arange(12), torch.ones_like(ids))))] * 4
    with pytest.raises(DataError, match="a batch holds document_ids, input_ids, labels, position_ids, but the model"):
        short_run(MODEL, DATA, tmp_path, eval_data=packed, steps=1)


def test_evaluation_data_may_be_padded_where_training_data_is_not(tmp_path: Path):
    result = short_run(MODEL, DATA, tmp_path, eval_data=padded_samples(4, 90), steps=1, export=False)
    assert result.eval_loss is not None


def test_a_stream_has_no_epochs(tmp_path: Path):
    class Stream:
        def __iter__(self) -> Iterator[dict[str, str]]:
            return iter([{"text": "words " * 100}] * 3)

    Stream.__module__ = "datasets.fake"
    with pytest.raises(ConfigError, match="option epochs = 1: the data is a stream") as info:
        short_run(MODEL, Stream(), tmp_path, steps=None, epochs=1)
    assert info.value.hint == "give steps instead"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="option device = 'cuda', but no CUDA device can be used") as info:
        short_run(MODEL, DATA, tmp_path, device="cuda")
    assert "phalanx env" in info.value.hint


def test_a_callback_with_a_misspelt_method_is_refused(tmp_path: Path):
    class Watch:
        def on_stepp(self, record: Any) -> None: ...

    with pytest.raises(ConfigError, match="callback Watch has an unknown method 'on_stepp'") as info:
        short_run(MODEL, DATA, tmp_path, callbacks=[Watch()])
    assert "did you mean 'on_step'" in info.value.hint


def test_an_optimizer_class_that_is_none_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="Linear'> is not a torch optimizer"):
        short_run(MODEL, DATA, tmp_path, optimizer_class=nn.Linear)


def test_the_command_line_says_the_same_and_exits_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    line = ["train", "--model", "gpt-2", "--tiny", "--out", str(tmp_path), "--progress", "off"]
    assert main(line) == 2
    assert "error: unknown model 'gpt-2'" in capsys.readouterr().err
