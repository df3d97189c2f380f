"""Trackers get every step's numbers; a missing package gives its install line; one that fails ends nothing."""

from __future__ import annotations

import importlib.util
import sys
import urllib.request
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from phalanx.config import RunConfig
from phalanx.errors import ConfigError
from phalanx.observe.progress import SilentProgress
from phalanx.observe.trackers import TRACKERS, measured, require_trackers, with_trackers
from tests.run_helpers import short_run

RECORD = {"step": 3, "samples": 12, "loss": 1.5, "eval_loss": 2.0, "unit": "tokens", "skipped": True, "mfu": None}


def test_numbers_are_grouped_and_words_left_out():
    assert measured(RECORD) == {"train/loss": 1.5, "eval/loss": 2.0}


class Said(SilentProgress):
    def __init__(self) -> None:
        self.messages: list[str] = []

    def message(self, text: str) -> None:
        self.messages.append(text)


def tell(tracker: str, folder: Path) -> Said:
    said = Said()
    told = with_trackers(said, [tracker], folder, RunConfig().model_dump(mode="json"))
    told.start({"model": "m"}, 10, 2)
    told.step(RECORD)
    told.finish({})
    told.close()
    return said


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch):
    """A module of this name that remembers what it is told."""

    def make(name: str, **members: Any) -> list[Any]:
        calls: list[Any] = []
        module = ModuleType(name)
        run = SimpleNamespace(
            log=lambda values, step: calls.append((values, step)), finish=lambda: calls.append("finish")
        )
        module.init = lambda **given: calls.append(given) or run  # pyright: ignore
        for member in members:
            setattr(module, member, lambda *args, _member=member, **given: calls.append((_member, args, given)))
        monkeypatch.setitem(sys.modules, name, module)
        return calls

    return make


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_runs_of_projects_are_begun_told_and_ended(package, tmp_path: Path, name: str):
    calls = package(name)
    require_trackers([f"{name}:mine"])
    assert not tell(f"{name}:mine", tmp_path / "run").messages
    begun, told, ended = calls
    assert (begun["project"], begun["name"], begun["resume"]) == ("mine", "run", "allow")
    assert begun["config"]["batch_size"] == 8
    assert told == ({"train/loss": 1.5, "eval/loss": 2.0}, 3) and ended == "finish"


def test_mlflow_gets_parameters_and_metrics(package, tmp_path: Path):
    calls = package("mlflow", set_experiment=0, start_run=0, log_params=0, log_metrics=0, end_run=0)
    tell("mlflow", tmp_path / "run")
    assert [call[0] for call in calls] == ["set_experiment", "start_run", "log_params", "log_metrics", "end_run"]
    assert calls[3][1:] == (({"train/loss": 1.5, "eval/loss": 2.0},), {"step": 3})


def test_tensorboard_gets_scalars(package, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    calls: list[Any] = []

    class Writer:
        def __init__(self, folder: str, purge_step: int) -> None:
            calls.append((folder, purge_step))

        def add_text(self, *args: Any) -> None: ...

        def add_scalar(self, *args: Any) -> None:
            calls.append(args)

        def close(self) -> None:
            calls.append("closed")

    package("tensorboard")
    module = ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = Writer  # pyright: ignore
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    require_trackers(["tensorboard"])
    tell("tensorboard", tmp_path)
    assert calls == [
        (str(tmp_path / "tensorboard"), 3), ("train/loss", 1.5, 3), ("eval/loss", 2.0, 3), "closed",
    ]  # fmt: skip


def test_prometheus_sets_gauges_and_listens_on_this_machine_only(package, tmp_path: Path, monkeypatch):
    found: dict[str, float] = {}
    asked: list[Any] = []
    server = SimpleNamespace(shutdown=lambda: asked.append("shutdown"), server_close=lambda: asked.append("closed"))

    class Gauge:
        def __init__(self, name: str, words: str, labels: list[str], registry: Any) -> None:
            self.name = name

        def labels(self, run: str) -> Any:
            return SimpleNamespace(set=lambda value: found.update({f"{self.name}{{{run}}}": value}))

    package("prometheus_client")
    client: Any = sys.modules["prometheus_client"]
    client.CollectorRegistry, client.Gauge = object, Gauge
    client.start_http_server = lambda port, addr, registry: asked.append((port, addr)) or (server, None)
    tell("prometheus:9999", tmp_path / "run")
    assert asked == [(9999, "127.0.0.1"), "shutdown", "closed"]
    assert found["phalanx_train_loss{run}"] == 1.5 and found["phalanx_step{run}"] == 3

    def refuse(port: int, addr: str, registry: Any) -> None:
        raise OSError(98, "Address already in use")

    client.start_http_server = refuse
    with pytest.raises(ConfigError, match=r"port 9464 of 127.0.0.1 cannot be used(.|\n)*prometheus:9465"):
        tell("prometheus", tmp_path)


def test_a_tracker_that_fails_is_let_go_with_a_word(package, tmp_path: Path, monkeypatch):
    calls = package("wandb")
    monkeypatch.setattr(sys.modules["wandb"], "init", lambda **given: SimpleNamespace(log=lambda *a, **b: 1 / 0))
    said = tell("wandb", tmp_path)
    assert said.messages == ["wandb failed and is told nothing more: ZeroDivisionError: division by zero"] and not calls


@pytest.mark.parametrize("name", TRACKERS)
def test_a_missing_package_gives_its_install_line(monkeypatch: pytest.MonkeyPatch, name: str):
    monkeypatch.setitem(sys.modules, TRACKERS[name].package, None)
    with pytest.raises(ConfigError, match=rf"'{name}' needs the package (.|\n)*pip install {TRACKERS[name].install}"):
        require_trackers([name])


@pytest.mark.parametrize(
    "item, message",
    [
        ("wnadb", r"report_to = 'wnadb' is unknown(.|\n)*'wandb'"),
        ("prometheus:high", r"'high' is no port(.|\n)*write prometheus:9464"),
        ("tensorboard:x", "tensorboard takes nothing after its name"),
    ],
)
def test_a_tracker_that_is_none_is_refused(item: str, message: str):
    with pytest.raises(ConfigError, match=message):
        require_trackers([item])


def test_a_run_tells_its_trackers(package, tmp_path: Path):
    calls = package("wandb")
    short_run("phalanx-demo", "synthetic", tmp_path, steps=2, report_to="wandb", export=False)
    assert [call[1] for call in calls[1:-1]] == [1, 2] and calls[-1] == "finish"
    assert "train/grad_norm" in calls[1][0]


@pytest.mark.skipif(importlib.util.find_spec("prometheus_client") is None, reason="prometheus-client is not installed")
def test_prometheus_answers_for_real(tmp_path: Path):
    told = with_trackers(SilentProgress(), ["prometheus:19464"], tmp_path / "run", {})
    told.start({}, 10, 0)
    told.step(RECORD)
    with urllib.request.urlopen("http://127.0.0.1:19464/metrics") as answer:
        assert b'phalanx_train_loss{run="run"} 1.5' in answer.read()
    told.close()


@pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="tensorboard is not installed")
def test_tensorboard_writes_for_real(tmp_path: Path):
    tell("tensorboard", tmp_path)
    assert any((tmp_path / "tensorboard").glob("events.*"))
