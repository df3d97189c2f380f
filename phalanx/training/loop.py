"""The training loop of one rank, readable top to bottom: batch → step → evaluate → log → checkpoint.

`Loop.fit` is the whole life of a run as one rank lives it; all ranks live it alike, and rank 0 reports. What is
trained on what is decided in `prepare`, how a step is carried out in `session`, what is said about it in `reporting`.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.engine.compiled import Compiled
from phalanx.engine.inputs import split
from phalanx.engine.measured import writing
from phalanx.engine.step import Outcome, training_flops
from phalanx.errors import CheckpointError, ConfigError, LinkError, PhalanxError
from phalanx.lab.rehearsal import rehearse
from phalanx.lab.spec import TIMED
from phalanx.launch.context import RankContext
from phalanx.launch.signals import StopRequest, stop_request
from phalanx.launch.status_board import BoardWatch
from phalanx.launch.store import forget_secrets
from phalanx.model.separable import require_labels
from phalanx.observe.metrics import Meter, device_peak_flops
from phalanx.observe.phases import Phases
from phalanx.observe.progress import make_progress
from phalanx.observe.runlog import RunLog
from phalanx.observe.trace import StepProfiler
from phalanx.params.flat import Piece
from phalanx.params.lr_schedule import change_text, learning_rate
from phalanx.plan.plan import Plan
from phalanx.state.folders import replace_text
from phalanx.state.folders import tidy as tidy_checkpoints
from phalanx.state.huggingface import tidy as tidy_export
from phalanx.state.lock import RunLock
from phalanx.state.rendezvous import LocalRendezvous, Meeting, MissingRanks, RankFailed, StoreRendezvous
from phalanx.state.saving import AsyncSaver, StorageError
from phalanx.state.snapshot import Snapshot, checkpoint_to_resume, restore, resumed_text
from phalanx.tasks.base import Batch
from phalanx.training.auto import choose_alone
from phalanx.training.budget import Budget, Fit, MemoryGuard
from phalanx.training.exporting import export_model
from phalanx.training.here import announce
from phalanx.training.job import Job, Summary
from phalanx.training.prediction import NUM_STEPS, Predictor
from phalanx.training.prepare import Prepared, load_buffers, open_weights, prepare
from phalanx.training.reporting import Emit, Reporter, StepFacts, header
from phalanx.training.session import Session

_has_run = False  # in this process
# A last checkpoint that the disk refuses is tried for an hour, in which somebody may make room.
_TRY_AGAIN_SECONDS, _TRIES = 10.0, 360


class Loop:
    """One rank's part of a job."""

    run: Prepared
    session: Session
    memory: MemoryGuard
    snapshot: Snapshot

    def __init__(self, job: Job, context: RankContext, emit: Emit) -> None:
        self.job, self.context, self._emit = job, context, emit
        self.config, self.folder = job.config, job.folder
        self._is_rank0 = context.rank == 0
        self._phases = Phases(job.began)
        self._resumed: Path | None = None  # the checkpoint that the run went on from
        self._still_ours: Callable[[], None] = lambda: None  # on rank 0: whether the lock holds

    def fit(self) -> Summary:
        """Trains to the end, from the beginning or from a checkpoint.

        Ctrl-C, SIGTERM and SIGHUP end the run after the current step, saved, with KeyboardInterrupt or SystemExit (143,
        129).
        """
        config = self.config
        with contextlib.ExitStack() as stack:
            shown = config.progress if self._is_rank0 else "off"
            progress = make_progress(shown, config.json_output and self._is_rank0, config.log_every)
            stack.callback(progress.close)
            self._take_folder(stack, progress.message)
            rows = self._set_up(progress.message)
            log = stack.enter_context(RunLog(self.folder, rank=self.context.rank))
            stack.enter_context(_logged_errors(log))
            if self._is_rank0:
                self._write_settings()
            peak = device_peak_flops(self.run.device, config.dtype)
            meter = Meter(total_steps=self.run.total_steps, peak=peak and peak * self.context.world)
            reporter = Reporter(self.snapshot, meter, log, progress, self._emit, self.run.device)
            saver = self._saver()
            stack.callback(_settle, saver)
            self._emit("on_start")
            reporter.start(rows)
            fit = self.memory.fit
            if self.run.choice is not None:
                choice = self.run.choice
                log.write("plan", plan=choice.plan.text, chosen=choice.how, reason=choice.reason, **choice.record)
            log.write("memory", predicted_bytes=fit.bytes, components=fit.components, on_host=fit.on_host)
            with stop_request(speaks=self._is_rank0) as stop:
                self._train(reporter, saver, stop)
            return self._end(reporter, saver, stop)

    def _train(self, reporter: Reporter, saver: AsyncSaver, stop: StopRequest) -> None:
        """Every step that is left: batch → step → evaluate → log → checkpoint."""
        config, slot = self.config, self.context.slot
        profiled = config.profile_steps if self._is_rank0 else None
        if os.environ.get(TIMED):
            session = self.session
            rehearse(session.step, session.evaluation, session.connected.world, *self._batch(1))
        predictor = Predictor(self.session, self.context, config.timeout)
        with contextlib.closing(StepProfiler(profiled, self.folder)) as profiler:
            first_step = self.snapshot.step + 1
            for step in range(first_step, self.run.total_steps + 1):
                slot.at_step(step)
                batch, first = self._batch(step)
                name = "first step" if step == first_step else "steps"
                with (
                    profiler.step(step), self._timeline(step), predictor.step(reporter.paused_seconds),
                    self._phases.phase(name),
                ):  # fmt: skip
                    outcome = self._step(batch, first, step, stop)
                slot.enter("step")  # the first of them also compiled
                eval_loss = self._evaluate(step, outcome, reporter) if self._due(step, config.eval_every) else None
                reporter.step(self._facts(step, eval_loss), outcome)
                if predictor.is_due:
                    with reporter.paused():
                        reporter.predicted(**predictor.fields(self.memory.fit.bytes))
                # Ranks agree within a step; alone there is nobody to agree with. Asked once: a signal between saving
                # and leaving loses no step.
                stopping = reporter.stops or (self.context.world == 1 and stop.signal is not None)
                every = config.checkpoint_every
                if every != "never" and (stopping or self._due(step, every)):
                    self._save(saver, reporter)
                if stopping or step == self.run.total_steps:
                    break
                self._tell_saved(saver, reporter)
            slot.enter("save")
            with self._phases.phase("checkpoint"):
                self._save_at_last(saver, reporter, stop)
        if self._is_rank0 and not predictor.was_due:
            reporter.predicted(no_step_seconds=f"a run of fewer than {NUM_STEPS} steps has none that could be measured")

    def _timeline(self, step: int) -> contextlib.AbstractContextManager[None]:
        if step != self.config.timeline_step:
            return contextlib.nullcontext()
        engine, world = self.session.step.engine, self.session.connected.world
        return writing(engine, self.context, world, self.folder / "timeline.json", self.config.timeout)

    def _batch(self, step: int) -> tuple[Batch, int]:
        """This rank's part of the batch, and its place in the stream of samples."""
        size = self.config.batch_size
        first, count = self.session.part((step - 1) * size, size)
        return self.run.batches.batch(first, count), first

    def _due(self, step: int, every: int) -> bool:
        return step == self.run.total_steps or bool(every and step % every == 0)

    def _lr(self, step: int) -> float:
        return learning_rate(self.config, step, self.run.total_steps)

    def _step(self, batch: Batch, first: int, step: int, stop: StopRequest) -> Outcome:
        run = self.run
        if run.plan.dp * run.plan.mb * run.plan.multiple > 1:
            require_labels(run.captured, batch, run.plan.shown)
        sizes = split(next(iter(batch.values())).shape[0], run.plan.mb)
        counts = (run.task.num_tokens(batch), training_flops(run.captured, batch, sizes))
        with self.memory.explained():
            return self.session.step(batch, first, self._lr(step), counts, stop=lambda: stop.signal is not None)

    def _evaluate(self, step: int, outcome: Outcome, reporter: Reporter) -> float | None:
        """The loss on the evaluation data, always on the same samples, without dropout."""
        batches = self.run.eval_batches
        if batches is None:
            return None
        outcome.read()  # so that the step's time is not taken for the evaluation's
        samples = min(self.config.eval_samples, batches.num_samples or self.config.eval_samples)
        with reporter.paused(), self.context.slot.within("evaluate"), self.memory.explained():
            loss = self.session.evaluate(batches, samples)
        self._emit("on_evaluate", {"step": step, "eval_loss": loss, "eval_samples": samples})
        return loss

    def _facts(self, step: int, eval_loss: float | None) -> StepFacts:
        return StepFacts(step, step * self.config.batch_size, self._lr(step), self.run.task.unit, eval_loss)

    def _saver(self) -> AsyncSaver:
        context = self.context
        meeting = StoreRendezvous(context.store, context.rank) if context.world > 1 else None
        saver = AsyncSaver(
            self.folder / "checkpoints", self.config.keep_checkpoints, rank=context.rank, world=context.world,
            rendezvous=meeting, still_ours=self._still_ours,
        )  # fmt: skip
        context.abort.listen(saver.give_up)
        return saver

    def _save(self, saver: AsyncSaver, reporter: Reporter) -> None:
        reporter.flush()
        with reporter.paused(), self._phases.phase("checkpoint"), self.context.slot.within("save"):
            saver.wait()
            self._tell_saved(saver, reporter)
            self.snapshot.optimizer, self.snapshot.loss_scale = self.session.state.scalars()
            saver.save(self.snapshot.step, self.session.state.shards(), self.snapshot.to_json())

    def _save_at_last(self, saver: AsyncSaver, reporter: Reporter, stop: StopRequest) -> None:
        """Waits for the last checkpoint; while the disk refuses it, tries again: the values are in memory only.

        All ranks see every refusal alike, and so try equally often.
        """
        signalled = stop.signal
        for _ in range(_TRIES):
            saver.wait()
            refused = self._tell_saved(saver, reporter, last=True)
            if refused is None:
                return
            time.sleep(_TRY_AGAIN_SECONDS)
            if self.context.abort.reason is not None or stop.signal is not signalled:
                raise refused
            self._save(saver, reporter)
        raise CheckpointError(
            f"the last checkpoint could not be saved for {_TRIES * _TRY_AGAIN_SECONDS / 60:.0f} minutes",
            f"the newest is {saver.last or self._resumed or 'none'}; make room and go on with --resume auto",
        )

    def _tell_saved(self, saver: AsyncSaver, reporter: Reporter, last: bool = False) -> StorageError | None:
        """Reports what became of saves since it was last asked; the refusal, if the newest was refused."""
        reporter.saved(saver.last)
        refused = saver.take_refusal()
        if refused is not None:
            reporter.refused(refused, saver.last or self._resumed, last)
        return refused

    def _take_folder(self, stack: contextlib.ExitStack, say: Callable[[str], None]) -> None:
        """Rank 0 locks the run folder and clears what killed runs left in it; the others wait until it has."""
        context, given_up = self.context, threading.Event()
        context.abort.listen(given_up.set)
        rendezvous = StoreRendezvous(context.store, context.rank) if context.world > 1 else LocalRendezvous()
        self._meeting = Meeting(context.rank, context.world, rendezvous, key="start", given_up=given_up)
        lock = RunLock(self.folder, say)

        def take() -> None:
            stack.enter_context(lock)
            tidy_checkpoints(self.folder / "checkpoints")
            tidy_export(self.folder / "export")

        with _blaming_others():
            self._meeting.agree("lock", 1, take)
            self._meeting.agree("there", context.world, lambda: None)
        if self._is_rank0:
            self._still_ours = lock.still_ours
            forget_secrets(self.folder)

    def _set_up(self, say: Callable[[str], None]) -> dict[str, Any]:
        """Prepares the run and puts its state in place, fresh or as a checkpoint holds it; returns the header."""
        config, job = self.config, self.job
        _forget_earlier_runs()
        with _blaming_others():
            found = checkpoint_to_resume(config.resume, self.folder / "checkpoints", self._meeting, say)
        say(f"preparing {config.model}: data, graph, weights")
        self.context.slot.enter("capture")
        if config.searches_plan:
            announce(self.context, config.memory_bytes)
        with self._phases.phase("prepare"), self._rank_0_first():
            run = self.run = prepare(
                job.model, job.data, job.eval_data, config, self.context, collate=job.collate, groups=job.groups,
                optimizer_class=job.optimizer_class,
            )  # fmt: skip
        self.context.slot.enter("compile")
        self.snapshot = Snapshot(config.model_dump(mode="json"), run.model_mark, run.data_mark, run.total_steps)
        if found is not None:
            self.snapshot, self._resumed = restore(found, self.snapshot), found.path
        weights, origin = open_weights(job.model, run.spec, config.seed, config.init)

        def read(name: str, is_master: bool, piece: Piece) -> Tensor:
            if found is None:
                return piece.read(weights, name)
            return piece.read(found, f"{'master' if is_master else 'model'}/{name}")

        self.memory = self._memory_guard()
        with self._phases.phase("weights"), self.memory.explained("the model's state"):
            self.session = Session.open(
                run.captured, config, run.plan, context=self.context, trainable=run.trainable, read=read,
                buffers=load_buffers(run.captured, weights, run.device), optimizer_class=job.optimizer_class,
                groups=run.groups, watches=[BoardWatch(self.context.slot)] if self.context.world > 1 else [],
                look=self.memory.look,
            )  # fmt: skip
            if found is not None:
                self.session.state.restore(found, self.snapshot.optimizer, self.snapshot.loss_scale)
                before = found.state["total_steps"]
                changed = change_text(config, found.step, before, run.total_steps)
                origin = "; ".join(filter(None, (resumed_text(found, run.total_steps), changed)))
        run = self.run = replace(self.run, plan=self.session.plan, choice=self.job.choice or self.run.choice)
        return header(run, config, self.session, origin, self.memory.fit)

    def _memory_guard(self) -> MemoryGuard:
        size, batches = self.config.batch_size, self.run.batches

        def first_batch(of: Compiled) -> tuple[Batch, int]:
            first, count = of.part(0, size)
            return batches.batch(first, count), first

        searches = self.run.subject is not None and self.context.world == 1
        replan = self._replan if searches else None
        return MemoryGuard(self.config.memory_bytes, self.run.device, size, first_batch, replan)

    def _replan(self, fit: Fit, look: Callable[[Plan], Fit], budget: Budget | None) -> Plan | None:
        """The plan of a run that leaves it open, on one rank."""
        assert self.run.subject is not None
        choice = choose_alone(self.run.subject, self.context, fit, look, budget)
        self.run = replace(self.run, choice=choice)
        return choice and choice.plan

    @contextlib.contextmanager
    def _rank_0_first(self) -> Iterator[None]:
        """Others wait, and find in the caches what rank 0 put there."""
        store, key = self.context.store, "prepared"
        if self.context.world > 1 and self.context.rank > 0:
            while not store.check([key]):
                if self.context.abort.wait(0.05):
                    raise PhalanxError(f"stopped while preparing: {self.context.abort.reason}")
            store.get(key)  # refused if rank 0 did not write it
        yield
        if self.context.world > 1 and self.context.rank == 0:
            store.set(key, "yes")

    def _write_settings(self) -> None:
        try:
            replace_text(self.folder / "config.yaml", self.config.to_yaml())
            replace_text(self.folder / "plan.json", self.run.plan.to_json() + "\n")
        except OSError as error:
            raise ConfigError(
                f"the run folder {self.folder} cannot be written: {error.strerror}", "choose another folder (--out)"
            ) from None

    def _end(self, reporter: Reporter, saver: AsyncSaver, stop: StopRequest) -> Summary:
        """Exports and sums up; or, if the run was stopped, says how to go on."""
        asked = reporter.stops or stop.signal is not None
        if asked and self.snapshot.step < self.run.total_steps:
            reporter.stopped(stop.signal, saver.last)
            self.session.close()
            raise (
                KeyboardInterrupt if stop.signal is signal.SIGINT else SystemExit(128 + (stop.signal or signal.SIGTERM))
            )
        with self._phases.phase("export"):
            exported = self._export() if self.config.export else None
        reporter.finish(self.folder, exported, self._phases)
        self.session.close()
        snapshot, saved = self.snapshot, saver.wait() or self._resumed
        return Summary(
            snapshot.step, snapshot.loss, snapshot.eval_loss, tuple(reporter.losses), snapshot.skipped, self.folder,
            saved, exported, None if isinstance(self.job.model, nn.Module) else self.run.spec,
        )  # fmt: skip

    def _export(self) -> Path:
        run, folder, merges = self.run, self.folder / "export", self.config.merge_lora
        return export_model(self.session, self.context, run.spec, folder, run.tokenizer, merges=merges)


def _forget_earlier_runs() -> None:
    """Their tensors may still be there: what holds a run together refers to each other, and Python looks for such
    cycles only when it has made many objects, however large they are."""
    global _has_run
    if _has_run:
        gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()
    _has_run = True


def _settle(saver: AsyncSaver) -> None:
    """After an error a checkpoint may still be on its way to the disk; the error is what the user must see."""
    with contextlib.suppress(PhalanxError):
        saver.wait()


@contextlib.contextmanager
def _blaming_others() -> Iterator[None]:
    """Around what ranks do together: who only heard that another failed leaves it to that one to say why."""
    try:
        yield
    except (RankFailed, MissingRanks) as error:
        raise LinkError(str(error)) from error


@contextlib.contextmanager
def _logged_errors(log: RunLog) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        log.write("error", error=type(error).__name__, message=str(error))
        raise
