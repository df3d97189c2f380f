"""The way into training: a run described by objects and options, and the ranks on which it takes place.

One rank trains in this process. Several are started on this machine, unless a launcher (torchrun, SLURM, MPI) already
started them and this process is one. What a rank does is in `loop.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from phalanx.config import RunConfig, require_eval_data
from phalanx.errors import ConfigError
from phalanx.launch.context import RankContext, local_device
from phalanx.launch.join import join, run_joined
from phalanx.launch.main_script import refuse_while_loading
from phalanx.launch.worker_pool import WorkerPool
from phalanx.model.zoo.zoo import Model
from phalanx.params.groups import ParameterGroup
from phalanx.state.folders import latest
from phalanx.state.lock import refuse_second_run
from phalanx.training.early import require_usable
from phalanx.training.job import Job, JobPayload, Result, Summary, fill, pack, unpack
from phalanx.training.loop import Loop
from phalanx.training.prepare import Collate, choose_num_ranks
from phalanx.training.reporting import Callbacks
from phalanx.training.trials import with_fastest


class Trainer:
    """A run: `model` is a name, folder, configuration, factory or module; `data` anything that can be opened as data.

    `config` holds every other option; what is given here as an object stands before what it names (`groups`: before
    those that it has as text). A module in memory
    gets its trained values when the run is over. `callbacks` may have the methods in `reporting.HOOKS`; they are called
    in this process. With one rank they find the run's state in `loop`, with several it lives elsewhere.
    """

    loop: Loop | None = None

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
        groups: Sequence[ParameterGroup] = (),
        began: float | None = None,
    ) -> None:
        config = config or RunConfig()
        eval_data = eval_data if eval_data is not None else (config.eval_data or None)
        names: dict[str, Any] = {"model": _name(model), "data": _names(data)}
        if eval_data is not None:
            names["eval_data"] = _names(eval_data)
        if optimizer_class is not None:
            names["optimizer"] = f"{optimizer_class.__module__}.{optimizer_class.__qualname__}"
        self.config = config.override(**names)
        require_eval_data(self.config)
        if isinstance(model, nn.Module) and self.config.checkpoint_every == "never":
            raise ConfigError(
                "option checkpoint_every = never: a module gets its trained values from the last checkpoint",
                "leave it out, or name the model instead of handing it over",
            )
        self.job = Job(
            model, data, eval_data, self.config, collate, optimizer_class, tuple(groups), began or time.time()
        )
        self.folder = self.job.folder
        self._callbacks = Callbacks(callbacks)

    @classmethod
    def from_config(cls, config: RunConfig, began: float | None = None) -> Trainer:
        """A run that is all in its options, as the command line's are. began: when it was asked for (default: now)."""
        return cls(config.model, config.data, config, began=began)

    def fit(self) -> Result:
        """Trains to the end, from the beginning or from a checkpoint.

        Ctrl-C and SIGTERM end the run after the current step, saved, with KeyboardInterrupt and SystemExit(143).
        """
        refuse_while_loading("Trainer.fit")
        require_usable(self.job.model, self.job.data, self.job.eval_data, self.config)
        try:
            summary = self._fit()
        except (KeyboardInterrupt, SystemExit):
            if (saved := latest(self.folder / "checkpoints")) is not None:
                self._fill(saved)
            raise
        result = Result(**vars(summary), model=self.job.model, config=self.config)
        if result.checkpoint is not None:
            self._fill(result.checkpoint)
        if self.loop is None or self.loop.context.rank == 0:
            self._callbacks.call("on_end", result)
        return result

    def _fit(self) -> Summary:
        """On the ranks that there are, or that are started for it."""
        device = self.config.device
        context = join(device, folder=self.folder)
        if context is not None:
            self._refuse_trials()
            return run_joined(context, self._fit_here, silence=self.config.silence)
        refuse_second_run(self.folder)
        ranks = choose_num_ranks(self.config)
        if ranks == 1:
            alone = RankContext.alone(local_device(device, 0))
            self._try_out(lambda job: Loop(job, alone, _nobody).fit())
            return self._fit_here(alone)
        with WorkerPool(ranks, device=device, silence=self.config.silence) as pool:
            self._try_out(lambda job: _run(pool, job))
            return _run(pool, self.job, lambda hook, given: self._on_event(hook, *given))

    def _try_out(self, run: Callable[[Job], Summary]) -> None:
        """From now on the job has the fastest of its best plans, where that was asked for."""
        if self.config.measure_top is not None:
            self.job = with_fastest(self.job, run)
            self.config = self.job.config

    def _refuse_trials(self) -> None:
        if self.config.measure_top is not None:
            raise ConfigError(
                f"option measure_top = {self.config.measure_top}: ranks that a launcher started run one job",
                "measure without a launcher, or leave measure_top out: plan=auto takes what is predicted to be best",
            )

    def _fit_here(self, context: RankContext) -> Summary:
        self.loop = Loop(self.job, context, self._on_event if context.rank == 0 else _nobody)
        return self.loop.fit()

    def _on_event(self, hook: str, *arguments: Any) -> None:
        """Something happened on rank 0."""
        self._callbacks.call(hook, *((self,) if hook == "on_start" else arguments))

    def _fill(self, saved: Path) -> None:
        """The user's own module gets the trained values."""
        if isinstance(self.job.model, nn.Module):
            fill(self.job.model, saved, self.config.lora)


def _run(pool: WorkerPool, job: Job, on_event: Callable[[str, Any], None] | None = None) -> Summary:
    with pack(job) as payload:
        return pool.run(fit_on_rank, payload, on_event=on_event)[0]


def fit_on_rank(context: RankContext, payload: JobPayload) -> Summary:
    """A rank's part of a job that came to it as a payload."""
    emit = (lambda hook, *arguments: context.emit(hook, arguments)) if context.rank == 0 else _nobody
    return Loop(unpack(payload), context, emit).fit()


def train(
    model: Model,
    data: Any,
    *,
    callbacks: Sequence[Any] = (),
    optimizer_class: type[Any] | None = None,
    collate: Collate | None = None,
    eval_data: Any = None,
    groups: Sequence[ParameterGroup] = (),
    **options: Any,
) -> Result:
    """Trains `model` on `data`; `options` are those of RunConfig. The same as `Trainer(…).fit()` in one call."""
    refuse_while_loading("phalanx.train")
    trainer = Trainer(
        model, data, RunConfig.create(**options),
        callbacks=callbacks, optimizer_class=optimizer_class, collate=collate, eval_data=eval_data, groups=groups,
    )  # fmt: skip
    return trainer.fit()


def _nobody(hook: str, *arguments: Any) -> None:
    """Where ranks other than 0 emit their events."""


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
