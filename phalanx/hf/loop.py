"""The training loop of transformers' Trainer, step by step: accumulate, clip, update, schedule, log, evaluate, save."""

from __future__ import annotations

import itertools
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers.trainer_utils import SaveStrategy, TrainOutput, has_length, rotate_checkpoints, speed_metrics

from phalanx.errors import ConfigError
from phalanx.hf import checkpoints, optimizers
from phalanx.hf.data import Batch, EpochOrder, batches

if TYPE_CHECKING:
    from phalanx.hf.trainer import Trainer

_FLAGS = ("should_training_stop", "should_epoch_stop", "should_save", "should_evaluate", "should_log")


class Loop:
    """One call of train(). resume: the checkpoint to go on from."""

    def __init__(self, trainer: Trainer, resume: str | Path | bool | None, ignore_keys: list[str] | None) -> None:
        self._trainer, self._args, self._ignore_keys = trainer, trainer.args, ignore_keys
        self._resume = checkpoints.find(resume, trainer.args) if resume is not None else None
        self._source = trainer.get_train_dataloader()
        self._length = len(self._source) if has_length(self._source) else None
        self._per_epoch, self._steps, self._epochs = self._extent()
        self._began = time.time()
        self._logged_at, self._total = 0, 0.0
        self._drawn: dict[str, Any] | None = None  # the random numbers' state at the checkpoint that is resumed

    def _extent(self) -> tuple[int, int, int]:
        """Updates in an epoch, updates and epochs in all."""
        args = self._args
        if self._length is None:
            if args.max_steps <= 0:
                raise ConfigError(
                    "Trainer.train: the dataset has no length, so that the run has no end", "set max_steps"
                )
            return args.max_steps, args.max_steps, sys.maxsize
        per_epoch = max(math.ceil(self._length / args.gradient_accumulation_steps), 1)
        if args.max_steps > 0:
            return per_epoch, args.max_steps, math.ceil(args.max_steps / per_epoch)
        return per_epoch, math.ceil(args.num_train_epochs * per_epoch), math.ceil(args.num_train_epochs)

    def run(self) -> TrainOutput:
        trainer = self._trainer
        self._open()
        trainer.state = trainer.new_state()
        trainer.state.train_batch_size = self._args.per_device_train_batch_size
        trainer.create_optimizer_and_scheduler(self._steps)
        if self._resume is not None:
            self._take_up(self._resume)
        trainer.state.compute_steps(self._args, self._steps)
        trainer.state.max_steps, trainer.state.num_train_epochs = self._steps, self._epochs
        first_step = self._logged_at = trainer.state.global_step
        self._loss = torch.zeros((), dtype=torch.float32, device=trainer.session.device)
        self._tell_callbacks()
        trainer.control = trainer.callback_handler.on_train_begin(self._args, trainer.state, trainer.control)
        if self._args.eval_on_start:
            trainer.evaluate(ignore_keys=self._ignore_keys)
        for epoch in range(first_step // self._per_epoch, self._epochs):
            self._epoch(epoch, first_step)
            if trainer.control.should_training_stop:
                break
        return self._finish(first_step)

    def _open(self) -> None:
        """The first batch shows the session what batches look like; it is drawn again when it is trained on."""
        trainer = self._trainer
        if trainer.computation.session is None:
            drawn = trainer.randomness.state()
            first = next(batches(self._source, trainer.randomness), None)
            if first is None:
                raise ConfigError(
                    "Trainer.train: the training data holds no batch", "give more samples, or smaller batches"
                )
            trainer.randomness.load(drawn)
            trainer.computation.opened(first)

    def _take_up(self, folder: Path) -> None:
        trainer = self._trainer
        trainer.state, rest = checkpoints.load(folder, trainer.session)
        zero = trainer.is_world_process_zero()
        trainer.state.is_world_process_zero = trainer.state.is_local_process_zero = zero
        trainer.lr_scheduler.load_state_dict({**trainer.lr_scheduler.state_dict(), **rest["scheduler"]})
        self._drawn = rest["randomness"]

    def _tell_callbacks(self) -> None:
        trainer = self._trainer
        handler: Any = trainer.callback_handler
        handler.optimizer, handler.lr_scheduler = trainer.optimizer, trainer.lr_scheduler
        handler.train_dataloader = self._source

    def _epoch(self, epoch: int, first_step: int) -> None:
        trainer, args = self._trainer, self._args
        trainer.control = trainer.callback_handler.on_epoch_begin(args, trainer.state, trainer.control)
        done = first_step - epoch * self._per_epoch if epoch == first_step // self._per_epoch else 0
        skipped = 0 if args.ignore_data_skip else done * args.gradient_accumulation_steps
        if isinstance(self._source.sampler, EpochOrder):
            self._source.sampler.epoch = epoch
        num_batches = done * args.gradient_accumulation_steps
        drawn, self._drawn = self._drawn, None
        for group in self._groups(batches(self._source, trainer.randomness, skipped, drawn)):
            num_batches += len(group)
            norm, rate = self._update(group)
            trainer.state.global_step += 1
            in_epoch = self._length or self._steps * args.gradient_accumulation_steps
            trainer.state.epoch = epoch + num_batches / in_epoch
            trainer.control = trainer.callback_handler.on_step_end(args, trainer.state, trainer.control)
            self._agree()
            self._log_evaluate_save(norm, rate)
            if trainer.control.should_epoch_stop or trainer.control.should_training_stop:
                break
        if num_batches == 0:
            trainer.control.should_training_stop = True
        trainer.control = trainer.callback_handler.on_epoch_end(args, trainer.state, trainer.control)
        self._agree()
        self._log_evaluate_save(None, optimizers.learning_rate(self._optimizer))

    def _groups(self, source: Iterator[Batch]) -> Iterator[list[Batch]]:
        """The batches of each update."""
        while group := list(itertools.islice(source, self._args.gradient_accumulation_steps)):
            yield group

    def _update(self, group: list[Batch]) -> tuple[torch.Tensor, float]:
        """One update from these batches; the norm of its gradients, and the learning rate."""
        trainer, handler = self._trainer, self._trainer.callback_handler
        trainer.control = handler.on_step_begin(self._args, trainer.state, trainer.control)
        trainer.computation.freeze_as_the_model()
        counts = [trainer.num_items(batch) for batch in group]
        items = None if None in counts else sum(count for count in counts if count is not None)
        for number, (batch, count) in enumerate(zip(group, counts, strict=True)):
            share = 1 / len(group) if not items or count is None else count / items
            loss = trainer.computation.backward(batch, None if trainer.is_loss_scaled and items else share, items)
            self._add(loss)
            if number < len(group) - 1:
                trainer.control = handler.on_substep_end(self._args, trainer.state, trainer.control)
        norm = trainer.session.clip_grad_norm_(self._args.max_grad_norm or math.inf)
        trainer.control = handler.on_pre_optimizer_step(self._args, trainer.state, trainer.control)
        rate = self._step()
        trainer.session.zero_grad()
        return norm, rate

    def _step(self) -> float:
        trainer, optimizer = self._trainer, self._optimizer
        if trainer.given_optimizer is not None:
            optimizers.follow(optimizer, trainer.given_optimizer)
            trainer.given_optimizer._opt_called = True  # pyright: ignore[reportAttributeAccessIssue]
        optimizer.step()
        trainer.control = trainer.callback_handler.on_optimizer_step(self._args, trainer.state, trainer.control)
        rate = optimizers.learning_rate(optimizer)
        if trainer.lr_scheduler is not None and not optimizers.waits_for_metrics(trainer.lr_scheduler):
            trainer.lr_scheduler.step()
        return rate

    @property
    def _optimizer(self) -> torch.optim.Optimizer:
        assert self._trainer.optimizer is not None
        return self._trainer.optimizer

    def _add(self, loss: torch.Tensor) -> None:
        """To the sum since the last log; one that is not finite counts as the mean of those before it."""
        value = loss.to(self._loss)
        if self._args.logging_nan_inf_filter:
            since = 1 + self._trainer.state.global_step - self._logged_at
            value = torch.where(value.isfinite(), value, self._loss / since)
        self._loss = self._loss + value

    def _agree(self) -> None:
        """What a callback decides on one rank (a clock) all ranks do, or they would wait for each other for ever."""
        trainer = self._trainer
        if not trainer.has_own_callbacks or trainer.session.world == 1:
            return
        flags = torch.tensor([float(getattr(trainer.control, name)) for name in _FLAGS], device=trainer.session.device)
        trainer.session.world_group.all_reduce(flags).wait("what callbacks decided")
        for name, flag in zip(_FLAGS, flags.tolist(), strict=True):
            setattr(trainer.control, name, flag > 0)

    def _log_evaluate_save(self, norm: torch.Tensor | None, rate: float) -> None:
        trainer, state = self._trainer, self._trainer.state
        if trainer.control.should_log and state.global_step > self._logged_at:
            loss = float(self._loss)
            logs = {"loss": loss / (state.global_step - self._logged_at), "learning_rate": rate}
            logs |= {} if norm is None else {"grad_norm": float(norm)}
            self._total, self._logged_at = self._total + loss, state.global_step
            self._loss = torch.zeros_like(self._loss)
            trainer.log(logs, self._began)
        if trainer.control.should_evaluate:
            self._evaluate()
        if trainer.control.should_save:
            self._save()

    def _evaluate(self) -> None:
        trainer, args, state = self._trainer, self._args, self._trainer.state
        metrics = trainer.evaluate(ignore_keys=self._ignore_keys)
        if optimizers.waits_for_metrics(trainer.lr_scheduler):
            trainer.lr_scheduler.step(self._metric(metrics))
        is_best = False
        if args.metric_for_best_model is not None:
            value, best = self._metric(metrics), state.best_metric
            is_best = best is None or (value > best if args.greater_is_better else value < best)
            if is_best:
                state.best_metric, state.best_global_step = value, state.global_step
        if args.save_strategy == SaveStrategy.BEST:
            trainer.control.should_save = is_best

    def _metric(self, metrics: dict[str, float]) -> float:
        name = self._args.metric_for_best_model or "loss"
        key = name if name.startswith("eval_") else f"eval_{name}"
        if key not in metrics:
            raise ConfigError(
                f"TrainingArguments: metric_for_best_model = {name!r} is not among the metrics of an evaluation",
                f"use one of {', '.join(each.removeprefix('eval_') for each in metrics)}",
            )
        return metrics[key]

    def _save(self) -> None:
        trainer, args, state = self._trainer, self._args, self._trainer.state
        folder = Path(args.output_dir or ".") / f"checkpoint-{state.global_step}"
        best = folder.with_name(f"checkpoint-{state.best_global_step}")
        if state.best_global_step and (best == folder or best.is_dir()):
            state.best_model_checkpoint = str(best)
        rest = {
            "scheduler": checkpoints.scheduler_state(trainer.lr_scheduler) if trainer.lr_scheduler is not None else {},
            "randomness": trainer.randomness.state(),
        }  # fmt: skip
        trainer.save_model(folder)
        checkpoints.save(folder, trainer.session, state, rest, args.save_only_model)
        if trainer.is_world_process_zero():
            rotate_checkpoints(
                str(folder.parent), args.save_total_limit, best_model_checkpoint=state.best_model_checkpoint
            )
        trainer.control = trainer.callback_handler.on_save(args, state, trainer.control)

    def _finish(self, first_step: int) -> TrainOutput:
        trainer, args, state = self._trainer, self._args, self._trainer.state
        steps = state.global_step - first_step
        mean = (self._total + float(self._loss)) / max(steps, 0.001)
        samples = steps * args.per_device_train_batch_size * args.gradient_accumulation_steps
        metrics = speed_metrics("train", self._began, num_samples=samples, num_steps=steps)
        metrics["train_loss"] = mean
        trainer.log(metrics)
        if args.load_best_model_at_end and state.best_model_checkpoint is not None:
            trainer.session.load(Path(state.best_model_checkpoint) / checkpoints.STATE)
        trainer.take_back()
        trainer.control = trainer.callback_handler.on_train_end(args, state, trainer.control)
        return TrainOutput(state.global_step, mean, metrics)
