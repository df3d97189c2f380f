"""The training loop of one process, readable top to bottom: batch → step → evaluate → log → checkpoint.

`Trainer.fit` is the whole life of a run. What is trained on what is decided in `prepare`, how a step is carried out in
`runtime`, what is said about it in `reporting`.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from phalanx.callbacks import Callbacks
from phalanx.config import RunConfig
from phalanx.errors import PhalanxError
from phalanx.model.zoo.zoo import Model, build
from phalanx.observe.metrics import Meter, device_peak_flops
from phalanx.observe.progress import make_progress
from phalanx.observe.runlog import RunLog
from phalanx.observe.trace import StepProfiler
from phalanx.prepare import Collate, Prepared, load_buffers, open_weights, prepare
from phalanx.reporting import Reporter, StepFacts, header
from phalanx.result import Result
from phalanx.runtime.memory import explain_out_of_memory, model_needs, step_needs
from phalanx.runtime.rank import Rank
from phalanx.runtime.schedule import lr_factor
from phalanx.runtime.signals import StopRequest, stop_request
from phalanx.runtime.step import Outcome, split, training_flops
from phalanx.state.async_saver import AsyncSaver
from phalanx.state.huggingface import export
from phalanx.state.snapshot import Snapshot, checkpoint_to_resume, restore, resumed_text
from phalanx.tasks.base import Batch


class Trainer:
    """A run: `model` is a name, folder, configuration, factory or module; `data` anything that can be opened as data.

    `config` holds every other option; what is given here as an object stands before what it names. A module in memory
    gets its trained values when the run is over. `callbacks` may have the methods in `phalanx.callbacks.HOOKS`; they
    find the run's state in `run`, `rank` and `snapshot`.
    """

    run: Prepared
    rank: Rank
    snapshot: Snapshot

    def __init__(
        self,
        model: Model,
        data: Any,
        config: RunConfig | None = None,
        *,
        callbacks: Sequence[Any] = (),
        optimizer_class: type[Any] | None = None,
        collate: Collate | None = None,
        eval_data: Any = None,
    ) -> None:
        config = config or RunConfig()
        self.model, self.data = model, data
        self.eval_data = eval_data if eval_data is not None else (config.eval_data or None)
        names: dict[str, Any] = {"model": _name(model), "data": _names(data)}
        if self.eval_data is not None:
            names["eval_data"] = _names(self.eval_data)
        if optimizer_class is not None:
            names["optimizer"] = f"{optimizer_class.__module__}.{optimizer_class.__qualname__}"
        self.config = config.override(**names)
        self.folder = Path(self.config.out).expanduser()
        self._callbacks, self._collate, self._optimizer_class = Callbacks(callbacks), collate, optimizer_class

    @classmethod
    def from_config(cls, config: RunConfig) -> Trainer:
        """A run that is all in its options, as the command line's are."""
        return cls(config.model, config.data, config)

    def fit(self) -> Result:
        """Trains to the end, from the beginning or from a checkpoint.

        Ctrl-C and SIGTERM end the run after the current step, saved, with KeyboardInterrupt and SystemExit(143).
        """
        config = self.config
        with contextlib.ExitStack() as stack:
            progress = make_progress(config.progress, config.json_output, config.log_every)
            stack.callback(progress.close)
            rows = self._set_up(progress.message)
            log = stack.enter_context(RunLog(self.folder, rank=0))
            stack.enter_context(_logged_errors(log))
            self._write_settings()
            peak = device_peak_flops(self.run.device, config.dtype)
            meter = Meter(total_steps=self.run.total_steps, peak=peak)
            reporter = Reporter(self.snapshot, meter, log, progress, self._callbacks, self.run.device)
            saver = AsyncSaver(self.folder / "checkpoints", config.keep_checkpoints)
            stack.callback(_settle, saver)
            self._callbacks.call("on_start", self)
            reporter.start(rows)
            with stop_request() as stop:
                self._train(reporter, saver, stop)
            return self._end(reporter, saver, stop)

    def _train(self, reporter: Reporter, saver: AsyncSaver, stop: StopRequest) -> None:
        """Every step that is left: batch → step → evaluate → log → checkpoint."""
        run, config = self.run, self.config
        with contextlib.closing(StepProfiler(config.profile_steps, self.folder)) as profiler:
            for step in range(self.snapshot.step + 1, run.total_steps + 1):
                first = (step - 1) * config.batch_size
                batch = run.batches.batch(first, config.batch_size)
                with profiler.step(step):
                    outcome = self._step(batch, first, self._lr(step))
                eval_loss = self._evaluate(step, outcome, reporter) if self._due(step, config.eval_every) else None
                reporter.step(self._facts(step, batch, eval_loss), outcome)
                stopping = stop.signal is not None  # asked once: one between saving and leaving loses no step
                if stopping or self._due(step, config.checkpoint_every):
                    self._save(saver, reporter)
                reporter.saved(saver.last)
                if stopping:
                    break
            reporter.saved(saver.wait())

    def _due(self, step: int, every: int) -> bool:
        return step == self.run.total_steps or bool(every and step % every == 0)

    def _lr(self, step: int) -> float:
        config = self.config
        return config.lr * lr_factor(
            step, total=self.run.total_steps, warmup=config.warmup_steps, shape=config.lr_schedule,
            min_ratio=config.min_lr_ratio,
        )  # fmt: skip

    def _step(self, batch: Batch, first: int, lr: float) -> Outcome:
        with explain_out_of_memory(*step_needs(self.run.plan, self.config.batch_size), self.run.device):
            return self.rank.step(batch, first, lr)

    def _evaluate(self, step: int, outcome: Outcome, reporter: Reporter) -> float | None:
        """The loss on the evaluation data, always on the same samples, without dropout."""
        batches = self.run.eval_batches
        if batches is None:
            return None
        outcome.read()  # so that the step's time is not taken for the evaluation's
        samples = min(self.config.eval_samples, batches.num_samples or self.config.eval_samples)
        with reporter.paused():
            loss = self.rank.evaluate(batches, samples)
        self._callbacks.call("on_evaluate", {"step": step, "eval_loss": loss, "eval_samples": samples})
        return loss

    def _facts(self, step: int, batch: Batch, eval_loss: float | None) -> StepFacts:
        run, size = self.run, self.config.batch_size
        flops = training_flops(run.captured, batch, split(size, run.plan.mb))
        tokens, unit = run.task.num_tokens(batch), run.task.unit
        return StepFacts(step, step * size, self._lr(step), tokens, unit, flops, eval_loss)

    def _save(self, saver: AsyncSaver, reporter: Reporter) -> None:
        reporter.flush()
        with reporter.paused():
            self.snapshot.optimizer = self.rank.optimizer.scalars()
            saver.save(self.snapshot.step, self.rank.tensors(), self.snapshot.to_json())

    def _set_up(self, say: Callable[[str], None]) -> dict[str, Any]:
        """Prepares the run and puts its state in place, fresh or as a checkpoint holds it; returns the header."""
        config = self.config
        found = checkpoint_to_resume(config.resume, self.folder / "checkpoints")
        say(f"preparing {config.model}: data, graph, weights")
        run = self.run = prepare(self.model, self.data, self.eval_data, config, collate=self._collate)
        self.snapshot = Snapshot(config.model_dump(mode="json"), run.model_mark, run.data_mark, run.total_steps)
        if found is not None:
            self.snapshot = restore(found, self.snapshot)
        weights, origin = open_weights(self.model, run.spec, config.seed)

        def read(name: str, is_master: bool) -> Tensor:
            return found.read(f"{'master' if is_master else 'model'}/{name}") if found else weights.read(name)

        with explain_out_of_memory(*model_needs(config.dtype), run.device):
            self.rank = Rank(
                run.captured, config, run.plan, device=run.device, trainable=run.trainable, read=read,
                buffers=load_buffers(run.captured, weights, run.device), optimizer_class=self._optimizer_class,
            )  # fmt: skip
            if found is not None:
                self.rank.restore_optimizer(found, self.snapshot.optimizer)
                origin = resumed_text(found, run.total_steps)
        return header(run, config, self.rank, origin)

    def _write_settings(self) -> None:
        self.config.save(self.folder / "config.yaml")
        (self.folder / "plan.json").write_text(self.run.plan.to_json() + "\n", encoding="utf-8")

    def _end(self, reporter: Reporter, saver: AsyncSaver, stop: StopRequest) -> Result:
        """Writes values back, exports and sums up; or, if the run was stopped, says how to go on."""
        if isinstance(self.model, nn.Module):
            self.rank.fill(self.model)
        if stop.signal is not None and self.snapshot.step < self.run.total_steps:
            reporter.stopped(stop.signal, saver.last)
            raise KeyboardInterrupt if stop.signal is signal.SIGINT else SystemExit(128 + stop.signal)
        exported = self._export() if self.config.export else None
        reporter.finish(self.folder, exported)
        snapshot = self.snapshot
        result = Result(
            snapshot.step, snapshot.loss, snapshot.eval_loss, tuple(reporter.losses), snapshot.skipped, self.folder,
            saver.last, exported, self._module,
        )  # fmt: skip
        self._callbacks.call("on_end", result)
        return result

    def _export(self) -> Path:
        spec = self.run.spec
        return export(
            self.folder / "export", model=build(spec, device="meta"), tensors=self.rank.parameters.values.items(),
            config=spec.config, tokenizer=self.run.tokenizer, base_folder=spec.folder,
        )  # fmt: skip

    def _module(self) -> nn.Module:
        if isinstance(self.model, nn.Module):
            return self.model
        spec = self.run.spec
        module = build(spec, dtype=self.run.dtype, dropout=self.config.dropout)
        config: Any = getattr(module, "config", None)
        if config is not None and spec.config is not None:
            config.use_cache = getattr(spec.config, "use_cache", False)  # training is built without one
        self.rank.fill(module)
        return module.eval()


def train(
    model: Model,
    data: Any,
    *,
    callbacks: Sequence[Any] = (),
    optimizer_class: type[Any] | None = None,
    collate: Collate | None = None,
    eval_data: Any = None,
    **options: Any,
) -> Result:
    """Trains `model` on `data`; `options` are those of RunConfig. The same as `Trainer(…).fit()` in one call."""
    if eval_data is not None:
        options["eval_data"] = _names(eval_data)
    trainer = Trainer(
        model, data, RunConfig.create(**options),
        callbacks=callbacks, optimizer_class=optimizer_class, collate=collate, eval_data=eval_data,
    )  # fmt: skip
    return trainer.fit()


def _name(model: Model) -> str:
    if isinstance(model, str | Path):
        return str(model)
    if isinstance(model, nn.Module):
        return type(model).__name__
    return getattr(model, "model_type", None) or getattr(model, "__name__", type(model).__name__)


def _names(data: Any) -> tuple[str, ...]:
    """What the resolved config calls data: paths as they are, objects by their class."""
    items = [data] if isinstance(data, str | Path) else data
    if isinstance(items, list | tuple) and items and all(isinstance(item, str | Path) for item in items):
        return tuple(map(str, items))
    return (type(data).__name__,)


def _settle(saver: AsyncSaver) -> None:
    """After an error a checkpoint may still be on its way to the disk; the error is what the user must see."""
    with contextlib.suppress(PhalanxError):
        saver.wait()


@contextlib.contextmanager
def _logged_errors(log: RunLog) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        log.write("error", error=type(error).__name__, message=str(error))
        raise
