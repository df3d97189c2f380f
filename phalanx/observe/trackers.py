"""Experiment trackers: each a display that sends a run's numbers elsewhere, loaded only where it is asked for.

`--report-to` names them. A missing package is found before anything is prepared, with the line that installs it. A
tracker that fails while the run goes on is let go with a word, and the run goes on.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.errors import ConfigError, nearest

if TYPE_CHECKING:
    from phalanx.observe.progress import Progress, Record

_NOT_MEASURED = ("step", "samples", "unit", "skipped", "spike")
PROMETHEUS_PORT = 9464


def measured(record: Record) -> dict[str, float]:
    """The numbers of a step's record as trackers group them: train/loss, eval/loss."""
    found: dict[str, float] = {}
    for name, value in record.items():
        if name not in _NOT_MEASURED and isinstance(value, int | float) and not isinstance(value, bool):
            of_eval = name.startswith("eval_")
            found[f"eval/{name.removeprefix('eval_')}" if of_eval else f"train/{name}"] = float(value)
    return found


class Tracker(ABC):
    """folder: of the run. config: its options. argument: what was written after its name and a colon."""

    package: str  # what must be importable
    install: str  # by what pip is told

    def __init__(self, folder: Path, config: Mapping[str, Any], argument: str) -> None:
        self.folder, self.config, self.argument = folder, config, argument

    @abstractmethod
    def start(self, header: Record, total_steps: int, first_step: int) -> None: ...

    @abstractmethod
    def log(self, values: Mapping[str, float], step: int) -> None: ...

    @abstractmethod
    def close(self) -> None: ...


class TensorBoard(Tracker):
    package, install = "tensorboard", "tensorboard"

    def start(self, header: Record, total_steps: int, first_step: int) -> None:
        writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter
        self._writer = writer(str(self.folder / "tensorboard"), purge_step=first_step + 1)
        self._writer.add_text("run", "\n".join(f"- {name}: {value}" for name, value in header.items()), first_step)

    def log(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases(Tracker):
    package, install = "wandb", "wandb"

    def start(self, header: Record, total_steps: int, first_step: int) -> None:
        self._run = importlib.import_module("wandb").init(
            project=self.argument or "phalanx", name=self.folder.name, config={**self.config, "header": dict(header)},
            dir=str(self.folder), id=_id(self.folder), resume="allow" if first_step else None,
        )  # fmt: skip

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


class Trackio(Tracker):
    package, install = "trackio", "trackio"

    def start(self, header: Record, total_steps: int, first_step: int) -> None:
        self._run = importlib.import_module("trackio").init(
            project=self.argument or "phalanx", name=self.folder.name, config=dict(self.config),
            resume="allow" if first_step else "never",
        )  # fmt: skip

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


class MlFlow(Tracker):
    package, install = "mlflow", "mlflow"

    def start(self, header: Record, total_steps: int, first_step: int) -> None:
        self._mlflow = importlib.import_module("mlflow")
        self._mlflow.set_experiment(self.argument or "phalanx")
        self._mlflow.start_run(run_name=self.folder.name)
        self._mlflow.log_params({name: str(value)[:500] for name, value in self.config.items()})

    def log(self, values: Mapping[str, float], step: int) -> None:
        # It takes letters, digits and a few signs, of which the slash is one.
        self._mlflow.log_metrics(dict(values), step=step)

    def close(self) -> None:
        self._mlflow.end_run()


class Prometheus(Tracker):
    """The newest numbers for whoever asks, on this machine only: http://127.0.0.1:PORT/metrics."""

    package, install = "prometheus_client", "prometheus-client"

    def start(self, header: Record, total_steps: int, first_step: int) -> None:
        client = importlib.import_module("prometheus_client")
        self._registry, self._gauge = client.CollectorRegistry(), client.Gauge
        self._gauges: dict[str, Any] = {}
        port = int(self.argument or PROMETHEUS_PORT)
        try:
            self._server, _ = client.start_http_server(port, addr="127.0.0.1", registry=self._registry)
        except OSError as error:
            raise ConfigError(
                f"option report_to = prometheus: port {port} of 127.0.0.1 cannot be used: {error.strerror or error}",
                "name another one: prometheus:9465",
            ) from None
        self._set("total_steps", total_steps)

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._set("step", step)
        for name, value in values.items():
            self._set(name.replace("/", "_"), value)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _set(self, name: str, value: float) -> None:
        if name not in self._gauges:
            words = name.replace("_", " ")
            self._gauges[name] = self._gauge(f"phalanx_{name}", words, ["run"], registry=self._registry)
        self._gauges[name].labels(run=self.folder.name).set(value)


TRACKERS: dict[str, type[Tracker]] = {
    "tensorboard": TensorBoard, "wandb": WeightsAndBiases, "trackio": Trackio, "mlflow": MlFlow,
    "prometheus": Prometheus,
}  # fmt: skip


def require_trackers(report_to: Sequence[str]) -> None:
    """Those that are asked for are known and installed."""
    for item in report_to:
        name, _, argument = item.partition(":")
        if name not in TRACKERS:
            raise ConfigError(f"option report_to = {item!r} is unknown", nearest(name, TRACKERS))
        if name == "tensorboard" and argument:
            raise ConfigError(f"option report_to = {item!r}: tensorboard takes nothing after its name", "leave it out")
        if name == "prometheus" and argument and not (argument.isdecimal() and 0 <= int(argument) < 2**16):
            raise ConfigError(
                f"option report_to = {item!r}: {argument!r} is no port", f"write prometheus:{PROMETHEUS_PORT}"
            )
        if not _is_installed(TRACKERS[name].package):
            raise ConfigError(
                f"option report_to = {item!r} needs the package {TRACKERS[name].package!r}, which is not installed",
                f"pip install {TRACKERS[name].install}",
            )


def _is_installed(package: str) -> bool:
    if package in sys.modules:
        return sys.modules[package] is not None
    return importlib.util.find_spec(package) is not None


def _id(folder: Path) -> str:
    """The same when a run goes on."""
    return hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]


def with_trackers(display: Progress, report_to: Sequence[str], folder: Path, config: Mapping[str, Any]) -> Progress:
    """A display that also tells trackers."""
    made = {item: TRACKERS[item.partition(":")[0]](folder, config, item.partition(":")[2]) for item in report_to}
    return _Told(display, made) if made else display


class _Told:
    def __init__(self, display: Progress, trackers: dict[str, Tracker]) -> None:
        self._display, self._trackers, self._started = display, trackers, set[str]()

    def start(self, header: Record, total_steps: int, first_step: int = 0) -> None:
        self._display.start(header, total_steps, first_step)
        for name, tracker in list(self._trackers.items()):
            with self._surviving(name):
                tracker.start(header, total_steps, first_step)
                self._started.add(name)

    def step(self, record: Record) -> None:
        self._display.step(record)
        values = measured(record)
        self._tell(lambda tracker: tracker.log(values, int(record["step"])))

    def message(self, text: str) -> None:
        self._display.message(text)

    def finish(self, summary: Record) -> None:
        self._display.finish(summary)

    def close(self) -> None:
        self._tell(lambda tracker: tracker.close())
        self._trackers.clear()
        self._display.close()

    def _tell(self, call: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._trackers.items()):
            if name in self._started:
                with self._surviving(name):
                    call(tracker)

    @contextmanager
    def _surviving(self, name: str) -> Iterator[None]:
        """A run does not end because somebody else's program does not listen."""
        try:
            yield
        except ConfigError:
            raise
        except Exception as error:
            self._trackers.pop(name, None)
            said = (str(error).strip().splitlines() or [""])[0]
            self._display.message(f"{name} failed and is told nothing more: {type(error).__name__}: {said}")
