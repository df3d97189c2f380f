"""The way into training: a run described by objects and options, and the ranks on which it takes place.

One rank trains in this process. Several are started on this machine, unless a launcher (torchrun, SLURM, MPI) already
started them and this process is one. What a rank does is in `loop.py`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from phalanx.config import RunConfig
from phalanx.contradictions import require_eval_data
from phalanx.errors import ConfigError, PhalanxError
from phalanx.launch import early
from phalanx.launch.context import RankContext, local_device
from phalanx.launch.follower import Follower, Survival
from phalanx.launch.join import find_place, join, run_joined
from phalanx.launch.main_script import refuse_while_loading
from phalanx.launch.succession import live_claim
from phalanx.launch.worker_pool import WorkerPool
from phalanx.model.zoo.zoo import Model
from phalanx.observe.requests import ask
from phalanx.params.groups import ParameterGroup
from phalanx.params.lr_schedule import LrFunction, MakeScheduler, ScheduledRate, require_no_schedule
from phalanx.params.optimizer_instance import ReadOptimizer, read_optimizer
from phalanx.plan.plan import Plan
from phalanx.prepare.did_not_fit import DoesNotFit, as_on_every_rank, run_joined_fitting, with_plans_that_fit
from phalanx.prepare.early import require_usable
from phalanx.prepare.prepare import Collate
from phalanx.prepare.read_model import choose_num_ranks
from phalanx.state.folders import latest
from phalanx.state.lock import refuse_second_run
from phalanx.state.remote import is_remote, local_copy
from phalanx.training.callbacks import Callbacks
from phalanx.training.failing import failure_told, failure_told_by_one
from phalanx.training.guarded import fit_guarded
from phalanx.training.job import Job, JobPayload, Result, Summary, fill, pack, stop_file, unpack
from phalanx.training.loop import Loop
from phalanx.training.metrics import Metric, require_metrics
from phalanx.training.spikes import MOST_ROLLBACKS, RollBack
from phalanx.training.trials import Trial, attempt_here, attempt_joined, with_fastest
from phalanx.written import plan_text


class Trainer:
    """A run: `model` is a name, folder, configuration, factory or module; `data` anything that can be opened as data.

    `config` holds every other option; what is given here as an object stands before what it names (`groups`: before
    those that it has as text). `optimizer`: an instance that was made for the module, which is read and not stepped;
    `lr_function`: from a step, counted from 1, to its learning rate; `scheduler`: from an optimizer to a scheduler of
    torch, instead. `metrics`: functions of the model's outputs and the batch, by name. A module in memory gets its
    trained values when the run is over. `callbacks` may have the methods in `callbacks.HOOKS`; they are called in this
    process. With one rank they find the run's state in `loop`, with several it lives elsewhere.
    """

    loop: Loop | None = None
    _speaks = True  # whether callbacks are called in this process, where its ranks are others

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
        optimizer: torch.optim.Optimizer | None = None,
        lr_function: LrFunction | None = None,
        scheduler: MakeScheduler | None = None,
        metrics: Mapping[str, Metric] | None = None,
        began: float | None = None,
    ) -> None:
        config = config or RunConfig()
        model = local_copy(model) if isinstance(model, str) and is_remote(model) else model
        if optimizer is not None:
            read = read_optimizer(optimizer, model)
            config, optimizer_class, groups = _told(config, read), read.kind, (*groups, *read.groups)
        lr_function = _rate(config, lr_function, scheduler)
        eval_data = eval_data if eval_data is not None else (config.eval_data or None)
        names: dict[str, Any] = {"model": _name(model), "data": _names(data)}
        if eval_data is not None:
            names["eval_data"] = _names(eval_data)
        if optimizer_class is not None:
            names["optimizer"] = f"{optimizer_class.__module__}.{optimizer_class.__qualname__}"
        self.config = config.override(**names)
        require_eval_data(self.config)
        require_metrics(self.config, metrics or {})
        if isinstance(model, nn.Module) and self.config.checkpoint_every == "never":
            raise ConfigError(
                "option checkpoint_every = never: a module gets its trained values from the last checkpoint",
                "leave it out, or name the model instead of handing it over",
            )
        self.job = Job(
            model, data, eval_data, self.config, collate, optimizer_class, tuple(groups), lr_function,
            dict(metrics or {}), began=began or time.time(),
        )  # fmt: skip
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
            summary = self._fit_with_rollbacks()
        except (KeyboardInterrupt, SystemExit):
            if (saved := latest(self.folder / "checkpoints")) is not None:
                self._fill(saved)
            raise
        result = Result(**vars(summary), model=self.job.model, config=self.config)
        if result.checkpoint is not None:
            self._fill(result.checkpoint)
        if self._speaks if self.loop is None else self.loop.context.rank == 0:
            self._callbacks.call("on_end", result)
        return result

    def stop(self) -> None:
        """The run ends well, saved and exported, after the step that it is at; for callbacks, and from anywhere."""
        self.folder.mkdir(parents=True, exist_ok=True)
        stop_file(self.folder).touch()

    def _fit_with_rollbacks(self) -> Summary:
        """A part of the run that ends in a spike is followed by one from the newest checkpoint."""
        for _ in range(MOST_ROLLBACKS):
            try:
                return self._fit()
            except RollBack as back:
                self._say(back.message)
                config = self.config.override(resume=back.checkpoint)
                self.job = replace(self.job, config=config, passed_over=back.passed_over)
        with failure_told(self.folder):
            try:
                return self._fit()
            except RollBack as back:
                raise PhalanxError(
                    f"{back.message}; that would be for the {MOST_ROLLBACKS + 1}th time",
                    "lower lr, set clip or a larger spike_factor; or look for broken samples at these steps in the run "
                    "log",
                ) from None

    def change(self, plan: str | Plan) -> None:
        """From a callback: another plan, between two of the next steps. `on_change` tells what came of it."""
        ask(self.folder, plan.full_text if isinstance(plan, Plan) else plan_text(plan))

    def _fit(self) -> Summary:
        """On the ranks that there are, or that are started for it."""
        device, place = self.config.device, find_place(os.environ)
        if place is not None and place.world > 1 and self.config.on_loss != "stop":
            return self._fit_guarded(place.one_machine)
        context = join(device, folder=self.folder)
        if context is not None:
            early.drop()
            self._refuse_rollbacks()
            return self._fit_joined(context)
        refuse_second_run(self.folder)
        ranks = choose_num_ranks(self.config)
        if ranks == 1:
            early.drop()
            self._refuse_survival("the only rank of a run cannot be survived", "leave on_loss out, or use more ranks")
            alone = RankContext.alone(local_device(device, 0))
            self._try_out(partial(attempt_here, lambda job: Loop(job, alone, _nobody).fit()))
            return self._fitting(lambda job: self._fit_here(alone, job))
        with WorkerPool(ranks, device=device, silence=self.config.silence) as pool:
            self._try_out(partial(attempt_here, lambda job: _run(pool, job)))
            return self._fitting(lambda job: _run(pool, job, lambda hook, given: self._on_event(hook, *given)))

    def _fit_joined(self, first: RankContext) -> Summary:
        """As one of the ranks that a launcher started. Where the plan gives way, they join once more: with keys of
        their own for each attempt."""
        waiting = [first]

        def joined() -> RankContext:
            context = waiting.pop() if waiting else join(self.config.device, folder=self.folder)
            assert context is not None
            return context

        def run(job: Job) -> Summary:
            context = joined()
            try:
                with failure_told_by_one(context, job.folder):
                    return run_joined_fitting(context, self._fit_here, job)
            except DoesNotFit:
                self.loop = None  # and with it what the attempt held
                raise

        def attempt(job: Job) -> Trial:
            return attempt_joined(joined(), lambda context, own: Loop(own, context, _nobody).fit(), job)

        say = self._say if first.rank == 0 else _unsaid
        self._try_out(attempt, say)
        return with_plans_that_fit(self.job, run, say)

    def _fit_guarded(self, one_machine: bool) -> Summary:
        """Ranks that may be lost, where a launcher would end the job with them."""
        self._refuse_rollbacks()
        if self.config.measure_top is not None:
            raise ConfigError(
                f"option measure_top = {self.config.measure_top}: ranks of a launcher that may be lost run one job",
                "find the fastest plan in a short run with on_loss=stop, or leave measure_top out",
            )
        claim = None if one_machine else live_claim(self.folder)
        guard = join("cpu", folder=self.folder, claim=claim)
        assert guard is not None
        self._speaks = guard.rank == 0 and claim is None
        if self._speaks:
            refuse_second_run(self.folder)

        def on_event(hook: str, given: Any) -> None:
            self._on_event(hook, *given)

        def run(pool: WorkerPool) -> Summary | None:
            return self._fitting(lambda job: _run(pool, job, on_event))

        def follow(follower: Follower) -> list[Summary]:
            survival = Survival(self.config.on_loss, self.config.min_ranks)

            def run(job: Job) -> list[Summary]:
                with pack(job) as payload, as_on_every_rank(), failure_told(job.folder):
                    return follower.run(on_event, survival, fit_on_rank, payload)

            found = with_plans_that_fit(self.job, run, _unsaid)
            self._speaks = self._speaks or follower.spread.leads
            return found

        if not one_machine:  # a guard that is lost is the loss of its machine, and not the end of the others
            term = claim.term if claim is not None else 0
            return fit_guarded(guard, self.job, self.config.device, run, follow, term)
        return run_joined(guard, fit_guarded, self.job, self.config.device, run, silence=self.config.silence)

    def _try_out(self, attempt: Callable[[Job], Trial], say: Callable[[str], None] | None = None) -> None:
        """From now on the job has the fastest of its best plans, where that was asked for."""
        if self.config.measure_top is not None:
            self.job = with_fastest(self.job, lambda job: with_plans_that_fit(job, attempt, say or self._say))
            self.config = self.job.config

    def _fitting(self, run: Callable[[Job], Summary]) -> Summary:
        """Where the plan is open, one that does not fit gives way to another."""
        return with_plans_that_fit(self.job, run, self._say)

    def _say(self, text: str) -> None:
        if self.config.progress != "off" and not self.config.json_output:
            print(text, flush=True)

    def _refuse_rollbacks(self) -> None:
        if self.config.on_spike == "rollback":
            raise ConfigError(
                "option on_spike = 'rollback' begins anew from a checkpoint, which ranks of a launcher cannot",
                "use on_spike=skip, or let phalanx start the ranks",
            )

    def _refuse_survival(self, why: str, hint: str) -> None:
        if self.config.on_loss != "stop":
            raise ConfigError(f"option on_loss = {self.config.on_loss!r} is not supported here: {why}", hint)

    def _fit_here(self, context: RankContext, job: Job | None = None) -> Summary:
        self.loop = Loop(job or self.job, context, self._on_event if context.rank == 0 else _nobody)
        return self.loop.fit()

    def _on_event(self, hook: str, *arguments: Any) -> None:
        """Something happened on rank 0."""
        self._callbacks.call(hook, *((self,) if hook == "on_start" else arguments))

    def _fill(self, saved: Path) -> None:
        """The user's own module gets the trained values."""
        if isinstance(self.job.model, nn.Module):
            fill(self.job.model, saved, self.config.lora)


def _run(pool: WorkerPool, job: Job, on_event: Callable[[str, Any], None] | None = None) -> Any:
    """What the first rank returned that is on this machine; None if there is none."""
    with pack(job) as payload, as_on_every_rank(), failure_told(job.folder):
        how, least = job.config.on_loss, job.config.min_ranks
        found = pool.run(fit_on_rank, payload, on_event=on_event, on_loss=how, least=least)
        return next((each for each in found if each is not None), None)


def fit_on_rank(context: RankContext, payload: JobPayload) -> Summary:
    """A rank's part of a job that came to it as a payload."""

    def emit(hook: str, *arguments: Any) -> None:
        if loop.context.rank == 0:
            loop.context.emit(hook, arguments)

    loop = Loop(unpack(payload), context, emit)
    return loop.fit()


def train(
    model: Model,
    data: Any,
    *,
    callbacks: Sequence[Any] = (),
    optimizer_class: type[Any] | None = None,
    collate: Collate | None = None,
    eval_data: Any = None,
    groups: Sequence[ParameterGroup] = (),
    optimizer: str | torch.optim.Optimizer | None = None,
    lr_function: LrFunction | None = None,
    scheduler: MakeScheduler | None = None,
    metrics: Mapping[str, Metric] | Sequence[str] | None = None,
    **options: Any,
) -> Result:
    """Trains `model` on `data`; `options` are those of RunConfig. The same as `Trainer(…).fit()` in one call."""
    refuse_while_loading("phalanx.train")
    instance = optimizer if isinstance(optimizer, torch.optim.Optimizer) else None
    named: dict[str, Any] = {} if optimizer is None or instance is not None else {"optimizer": optimizer}
    own = metrics if isinstance(metrics, Mapping) else None
    named |= {} if metrics is None or own is not None else {"metrics": metrics}
    trainer = Trainer(
        model, data, RunConfig.create(**named, **options),
        callbacks=callbacks, optimizer_class=optimizer_class, collate=collate, eval_data=eval_data, groups=groups,
        optimizer=instance, lr_function=lr_function, scheduler=scheduler, metrics=own,
    )  # fmt: skip
    return trainer.fit()


def _told(config: RunConfig, read: ReadOptimizer) -> RunConfig:
    """The options with what an optimizer says of itself; what the user set besides would contradict it."""
    for name in ("lr", "betas", "eps", "weight_decay", "optimizer_options"):
        value = getattr(config, name)
        if value != RunConfig.model_fields[name].default:
            raise ConfigError(
                f"option {name} = {value!r} does nothing: the optimizer that was given has its own",
                "set it in that optimizer, or give its class (optimizer_class=) and options",
            )
    return config.override(**read.options)


def _rate(config: RunConfig, lr_function: LrFunction | None, scheduler: MakeScheduler | None) -> LrFunction | None:
    if lr_function is not None and scheduler is not None:
        raise ConfigError("lr_function and scheduler exclude each other", "give one")
    if lr_function is None and scheduler is None:
        return None
    require_no_schedule(config, "scheduler" if scheduler else "lr_function")
    return lr_function or ScheduledRate(scheduler, config.lr)  # pyright: ignore[reportArgumentType]


def _unsaid(text: str) -> None:
    """Where ranks other than 0 say things."""


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
    if isinstance(data, Mapping):
        return tuple(f"{_names(source)[0]}:{weight}" for source, weight in data.items())
    items = [data] if isinstance(data, str | Path) else data
    if isinstance(items, list | tuple) and items and all(isinstance(item, str | Path) for item in items):
        return tuple(map(str, items))
    return (type(data).__name__,)
