from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest

from phalanx.cli.main import main
from phalanx.cli.train import metavar, signature
from phalanx.config import RunConfig


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[RunConfig]:
    """The configs that were trained, by a trainer that only takes note of them."""
    configs: list[RunConfig] = []

    class Trainer:
        @classmethod
        def from_config(cls, config: RunConfig, began: float) -> Trainer:
            cls.config = config
            return cls()

        def fit(self) -> None:
            configs.append(self.config)

    module = types.ModuleType("phalanx.training.trainer")
    module.Trainer = Trainer  # pyright: ignore
    monkeypatch.setitem(sys.modules, "phalanx.training.trainer", module)
    return configs


def test_without_options_the_defaults_are_trained(trained: list[RunConfig]):
    assert main(["train"]) == 0
    assert trained == [RunConfig()]


def test_every_kind_of_option_reaches_the_config(
    trained: list[RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    for name in "ab":
        (tmp_path / name).write_text("some text")
    line = "train --model gpt2 --data a --data b --steps 3 --no-shuffle --tiny --betas 0.8 0.9 --lr 1e-3 --clip none"
    assert main([*line.split(), "--freeze", "embed*", "--json", "--resume", "auto"]) == 0
    expected = RunConfig(
        model="gpt2",
        data=("a", "b"),
        steps=3,
        shuffle=False,
        tiny=True,
        betas=(0.8, 0.9),
        lr=1e-3,
        clip=None,
        freeze=("embed*",),
        json_output=True,
        resume="auto",
    )
    assert trained == [expected]


def test_optimizer_options_are_given_as_name_and_value(trained: list[RunConfig]):
    line = "train --optimizer sgd --optimizer-options momentum=0.9 --optimizer-options nesterov=true"
    assert main(line.split()) == 0
    assert trained[0].optimizer_options == {"momentum": 0.9, "nesterov": True}


def test_the_command_line_wins_over_the_file(trained: list[RunConfig], tmp_path: Path):
    file = tmp_path / "run.yaml"
    file.write_text("epochs: 2\nlr: 0.5\nshuffle: false\n")
    assert main(["train", "--config", str(file), "--steps", "3", "--shuffle"]) == 0
    assert trained == [RunConfig(steps=3, lr=0.5, shuffle=True)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seq-len", "x"], "option seq_len = 'x' must be a valid integer"),
        (["--progress", "ritch"], "option progress = 'ritch' is not one of auto, rich, plain, off"),
        (["--optimizer-options", "momentum"], "--optimizer-options 'momentum' is not of the form NAME=VALUE"),
        (
            ["--model-options", "x"],
            "--model-options 'x' is not of the form NAME=VALUE\n  → write e.g. --model-options num_",
        ),
        (["--config", "nowhere.yaml"], "nowhere.yaml: cannot be read"),
    ],
)
def test_a_mistake_is_reported_before_anything_is_trained(
    arguments: list[str], message: str, trained: list[RunConfig], capsys: pytest.CaptureFixture[str]
):
    assert main(["train", *arguments]) == 2
    assert f"error: {message}" in capsys.readouterr().err
    assert trained == []


def test_there_is_one_option_per_field():
    assert list(signature().parameters) == ["config", *RunConfig.model_fields]


def test_the_help_shows_every_option_with_its_choices(capsys: pytest.CaptureFixture[str], monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["train", "--help"]) == 0
    shown = capsys.readouterr().out
    for name in RunConfig.model_fields.keys() - {"json_output"}:
        assert "--" + name.replace("_", "-") in shown
    assert "cosine|linear|constant" in shown and "NAME=VALUE" in shown and "[0.0003]" in shown


def test_metavars_say_what_to_write():
    fields = RunConfig.model_fields
    shown = {name: metavar(fields[name].annotation) for name in ("steps", "lr", "model", "data", "betas", "on_broken")}
    assert shown == {
        "steps": "INTEGER",
        "lr": "NUMBER",
        "model": "TEXT",
        "data": "TEXT",
        "betas": "NUMBER NUMBER",
        "on_broken": "refuse|skip",
    }
