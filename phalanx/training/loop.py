"""The training loop of one rank, readable top to bottom: batch → step → evaluate → log → checkpoint.

`Loop.fit` is the whole life of a run as one rank lives it; all ranks live it alike, and rank 0 reports. What is
trained on what is decided in `prepare`, how a step is carried out in `session`, what is said about it in `reporting`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.adapt.migrate import ChangeRefused
from phalanx.data.batches import Batches
from phalanx.engine.compiled import Compiled
from phalanx.engine.inputs import split
from phalanx.engine.measured import writing
from phalanx.engine.step import Outcome, training_flops
from phalanx.errors import CheckpointError, ConfigError, LinkError, PhalanxError, PlanError
from phalanx.lab.rehearsal import rehearse
from phalanx.lab.spec import TIMED
from phalanx.launch.context import RankContext
from phalanx.launch.signals import StopRequest, stop_request
from phalanx.launch.status_board import BoardWatch
from phalanx.launch.store import forget_secrets
from phalanx.model.separable import require_labels
from phalanx.observe.memory_snapshot import memory_snapshot, require_cuda
from phalanx.observe.metrics import Meter, device_peak_flops
from phalanx.observe.phases import Phases
from phalanx.observe.progress import make_progress
from phalanx.observe.requests import Answer
from phalanx.observe.runlog import RunLog
from phalanx.observe.trace import StepProfiler
from phalanx.observe.trackers import with_trackers
from phalanx.params.flat import Piece
from phalanx.params.lr_functions import checked_rate
from phalanx.params.lr_schedule import change_text, learning_rate
from phalanx.plan.complete import complete, usable_ranks
from phalanx.plan.periods import Period
from phalanx.plan.plan import Plan
from phalanx.state.folders import final_folder, replace_text
from phalanx.state.folders import tidy as tidy_checkpoints
from phalanx.state.huggingface import tidy as tidy_export
from phalanx.state.lock import RunLock
from phalanx.state.remote import Mirror, fetch_folder, fetch_newest, is_remote, refuse_used_mirror
from phalanx.state.rendezvous import LocalRendezvous, Meeting, MissingRanks, RankFailed, StoreRendezvous
from phalanx.state.saving import AsyncSaver, StorageError
from phalanx.state.snapshot import Snapshot, checkpoint_to_resume, restore, resumed_text
from phalanx.tasks.base import Batch
from phalanx.training.auto import choose_alone
from phalanx.training.budget import Budget, Fit, MemoryGuard
from phalanx.training.change import Change, Member, change, open_member
from phalanx.training.changing import Changes, Wanted, refusal
from phalanx.training.exporting import export_dcp, export_model
from phalanx.training.generating import Generator
from phalanx.training.here import announce
from phalanx.training.job import Job, Summary, stop_file
from phalanx.training.metrics import Metrics, perplexity
from phalanx.training.prediction import NUM_STEPS, Predictor
from phalanx.training.prepare import Prepared, load_buffers, open_weights, prepare, require_change
from phalanx.training.reporting import Emit, Reporter, StepFacts, header
from phalanx.training.session import Opening, Session
from phalanx.training.spare import Spare
from phalanx.training.spikes import RollBack, spike_limit

_has_run = False  # in this process
# A last checkpoint that the disk refuses is tried for an hour, in which somebody may make room.
_TRY_AGAIN_SECONDS, _TRIES = 10.0, 360


class Loop:
    """One rank's part of a job."""

    run: Prepared
    session: Member
    changes: Changes
    memory: MemoryGuard
    metrics: Metrics | None = None
    generator: Generator | None = None
    mirror: Mirror | None = None  # on rank 0
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
            if self._is_rank0:
                progress = with_trackers(progress, config.report_to, self.folder, config.model_dump(mode="json"))
            stack.callback(progress.close)
            self._take_folder(stack, progress.message)
            self._open_mirror(stack, progress.message)
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
            if self.run.choice is not None:
                choice = self.run.choice
                log.write("plan", plan=choice.plan.text, chosen=choice.how, reason=choice.reason, **choice.record)
            if isinstance(self.session, Session):
                fit = self.memory.fit
                log.write("memory", predicted_bytes=fit.bytes, components=fit.components, on_host=fit.on_host)
            with stop_request(speaks=self._is_rank0) as stop:
                self._train(reporter, saver, stop)
            return self._end(reporter, saver, stop)

    def _train(self, reporter: Reporter, saver: AsyncSaver, stop: StopRequest) -> None:
        """Every step that is left: batch → step → evaluate → log → checkpoint."""
        config, slot = self.config, self.context.slot
        profiled = config.profile_steps if self._is_rank0 else None
        if os.environ.get(TIMED) and isinstance(self.session, Session):
            session = self.session
            rehearse(session.step, session.evaluation, session.connected.world, *self._batch(session, 1))
        predictor = self._predictor()
        with contextlib.closing(StepProfiler(profiled, self.folder)) as profiler:
            first_step = self.snapshot.step + 1
            for step in range(first_step, self.run.total_steps + 1):
                slot.at_step(step)
                if self._change_plan(step, reporter):
                    predictor = self._predictor(f" from step {step} on")
                name = "first step" if step == first_step else "steps"
                at = self.folder / f"memory-step-{step}-rank{self.context.rank}.pickle"
                predicting = predictor.step(reporter.paused_seconds) if predictor else contextlib.nullcontext()
                with (
                    profiler.step(step), memory_snapshot(step, config.memory_snapshot, at), self._timeline(step),
                    predicting, self._phases.phase(name),
                ):  # fmt: skip
                    outcome = self._step(step, stop)
                slot.enter("step")  # the first of them also compiled
                evaluated = self._evaluate(step, outcome, reporter) if self._due(step, config.eval_every) else {}
                eval_loss = evaluated.pop("eval_loss", None)
                is_best = eval_loss is not None and self.snapshot.judge(step, eval_loss)
                reporter.step(self._facts(step, eval_loss, evaluated), outcome)
                if reporter.spike is not None and config.on_spike == "rollback":
                    self._roll_back(saver, reporter.spike, step)
                if self.generator is not None and self._due(step, config.generate_every):
                    with reporter.paused(), self.context.slot.within("generate"):
                        reporter.generated(step, self.generator(self.session, step))
                if predictor is not None and predictor.is_due:
                    with reporter.paused():
                        reporter.predicted(**predictor.fields(self.memory.fit.bytes))
                # Ranks agree within a step; alone there is nobody to agree with. Asked once: a signal between saving
                # and leaving loses no step.
                stopping = reporter.stops or (self.context.world == 1 and stop.signal is not None)
                ending = self._reason_to_end(reporter, evaluated=eval_loss is not None)
                every = config.checkpoint_every
                due = stopping or ending or (is_best and config.keep_best)
                if every != "never" and (due or self._due(step, every)):
                    self._save(saver, reporter)
                if ending and not stopping:
                    reporter.ended(ending)
                if stopping or ending or step == self.run.total_steps:
                    break
                self._tell_saved(saver, reporter)
            slot.enter("save")
            with self._phases.phase("checkpoint"):
                self._save_at_last(saver, reporter, stop)
        if self._is_rank0 and predictor is not None and not predictor.was_due:
            reporter.predicted(no_step_seconds=f"a run of fewer than {NUM_STEPS} steps has none that could be measured")

    def _predictor(self, name: str = "") -> Predictor | None:
        session = self.session
        return Predictor(session, self.context, self.config.timeout, name) if isinstance(session, Session) else None

    def _change_plan(self, step: int, reporter: Reporter) -> bool:
        """Before a step: whatever its options or somebody else want changed. Whether something was."""
        changed = False
        for wanted in self.changes.at(step, self.session, reporter.changes):
            reporter.flush()
            with reporter.paused(), self.context.slot.within("compile"):
                record = self._try(wanted, step)
            reporter.changed(record)
            changed = changed or "refused" not in record
        reporter.changes = False
        return changed

    def _try(self, wanted: Wanted, step: int) -> dict[str, Any]:
        """Changes to the first of the plans that is not refused; what is said of it."""
        began, old, before = time.perf_counter(), self.session.plan, self.changes.period
        record: dict[str, Any] = {"step": step, "old": old.shown, "how": wanted.how}
        refused: PhalanxError = ChangeRefused("no plan was named")
        for text in wanted.plans:
            try:
                done = self._change(wanted.period, text)
            except (ChangeRefused, PlanError) as error:
                refused = error
                continue
            record |= {"plan": done.new.shown, "bytes": done.bytes, "parts": done.seconds}
            for name in ("batch_size", "seq_len"):
                if getattr(wanted.period, name) != getattr(before, name):
                    record[name] = getattr(wanted.period, name)
            record["seconds"] = time.perf_counter() - began
            self.changes.plan = text
            self.changes.answer(wanted, Answer(done.new.shown, step, seconds=record["seconds"], bytes=done.bytes))
            if self._is_rank0:
                replace_text(self.folder / "plan.json", done.new.to_json() + "\n")
            return record
        if wanted.must:
            raise refused
        self.changes.period = wanted.period
        self.changes.answer(wanted, Answer(wanted.plans[0], refused=refused.message, hint=refused.hint))
        return record | {"plan": wanted.plans[0], "refused": refusal(refused)}

    def _change(self, period: Period, text: str) -> Change:
        batches = self.run.lengths[period.seq_len]
        costs = self.run.captured.blocks.flops(self.run.captured.dims(batches.batch(0, 1)))
        usable = usable_ranks(text, self.context.world)
        plan = complete(text, world=usable, batch_size=period.batch_size, costs=costs).plan
        require_change(self.run, self.config, plan)
        if self.metrics is not None:
            self.metrics.require_change(plan, self.context.world)
        memory = self._memory_guard(period.batch_size, batches)
        memory.held = sum(tensor.nbytes for tensor in self.session.state.tensors())
        config = self.config.override(batch_size=period.batch_size)
        self.session, done = change(self.session, plan, config, memory.look)
        self.run = dataclasses.replace(self.run, plan=plan, batches=batches)
        self.memory, self.changes.period = memory, period
        if self.metrics is not None:
            self.metrics.close()
            self._open_metrics()
        return done

    def _timeline(self, step: int) -> contextlib.AbstractContextManager[None]:
        if step != self.config.timeline_step or not isinstance(self.session, Session):
            return contextlib.nullcontext()
        engine, world = self.session.step.engine, self.session.connected.world
        return writing(engine, self.context, world, self.folder / "timeline.json", self.config.timeout)

    def _batch(self, session: Session, step: int) -> tuple[Batch, int]:
        """This rank's part of the batch, and its place in the stream of samples."""
        period = self.changes.period
        first, count = session.part(period.sample_at(step) + self.snapshot.passed_over, period.batch_size)
        return self.run.batches.batch(first, count), first

    def _due(self, step: int, every: int) -> bool:
        return step == self.run.total_steps or bool(every and step % every == 0)

    def _lr(self, step: int) -> float:
        if self.job.lr_function is not None:
            return checked_rate(self.job.lr_function, step)
        return learning_rate(self.config, step, self.run.total_steps)

    def _step(self, step: int, stop: StopRequest) -> Outcome:
        run, session = self.run, self.session
        if isinstance(session, Spare):
            return session.step(num_counts=3)
        batch, first = self._batch(session, step)
        if run.plan.dp * run.plan.mb * run.plan.multiple > 1:
            require_labels(run.captured, batch, run.plan.shown)
        sizes = split(next(iter(batch.values())).shape[0], run.plan.mb)
        asked = self._is_rank0 and stop_file(self.folder).exists()
        counts = (run.task.num_tokens(batch), training_flops(run.captured, batch, sizes), float(asked))
        with self.memory.explained():
            return session.step(
                batch, first, self._lr(step), counts, stop=lambda: stop.signal is not None,
                change=self.changes.is_asked, most_loss=self._most_loss(step),
            )  # fmt: skip

    def _most_loss(self, step: int) -> float | None:
        """With a larger loss a step is a spike."""
        factor = self.config.spike_factor
        return None if factor is None else spike_limit(self.snapshot.recent, step, factor)

    def _evaluate(self, step: int, outcome: Outcome, reporter: Reporter) -> dict[str, float]:
        """Loss and metrics on the evaluation data, always on the same samples, without dropout."""
        batches = self.run.eval_batches
        if batches is None:
            return {}
        outcome.read()  # so that the step's time is not taken for the evaluation's
        samples = min(self.config.eval_samples, batches.num_samples or self.config.eval_samples)
        with reporter.paused(), self.context.slot.within("evaluate"), self.memory.explained():
            loss = self.session.evaluate(batches, samples)
            found = {"eval_loss": loss, **perplexity(self.run.task, loss)}
            found |= self.metrics(batches, samples) if self.metrics is not None else {}
        self._emit("on_evaluate", {"step": step, **found, "eval_samples": samples})
        return found

    def _resume(self) -> str:
        """Which checkpoint to go on from, as a path of this machine."""
        resume = self.config.resume
        name = resume.rstrip("/").rpartition("/")[2]
        return str(self.folder / "checkpoints" / name) if is_remote(resume) else resume

    def _roll_back(self, saver: AsyncSaver, spike: int, step: int) -> None:
        """Ends this part of the run, on all ranks; the next goes on from the newest checkpoint and leaves the samples
        since then out."""
        newest = saver.wait() or self._resumed
        if newest is None:
            return  # nothing to go back to: the spike was skipped
        back = int(newest.name.removeprefix("step-"))
        periods = self.config.periods
        seen = periods.at(step).sample_at(step + 1) - periods.at(back + 1).sample_at(back + 1)
        passed_over = self.snapshot.passed_over + seen
        raise RollBack(
            f"the loss of step {spike} is a spike: going back to {newest.name}, and leaving {step - back} batches out",
            passed_over=passed_over, checkpoint=str(newest),
        )  # fmt: skip

    def _reason_to_end(self, reporter: Reporter, evaluated: bool) -> str | None:
        """Why the run is to end before its last step. All ranks come to the same answer."""
        snapshot, patience = self.snapshot, self.config.early_stop
        if reporter.ends:
            return "asked for (stop)"
        if evaluated and patience is not None and snapshot.worse_in_a_row >= patience:
            best = f"{snapshot.best_loss:.4f} of step {snapshot.best_step}" if snapshot.best_step else "a number"
            return f"{snapshot.worse_in_a_row} evaluations in a row were not below {best} (early_stop = {patience})"
        return None

    def _facts(self, step: int, eval_loss: float | None, eval_values: Mapping[str, float]) -> StepFacts:
        samples, unit = self.changes.period.sample_at(step + 1) + self.snapshot.passed_over, self.run.task.unit
        return StepFacts(step, samples, self._lr(step), unit, eval_loss, eval_values, self._most_loss(step))

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
            self.snapshot.own_lr = self._lr(self.snapshot.step) if self.job.lr_function is not None else None
            spare = self.snapshot.best_step if self.config.keep_best else None
            saver.save(self.snapshot.step, self.session.state.shards(), self.snapshot.to_json(), spare)

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
        if reporter.saved(saver.last) and self.mirror is not None and saver.last is not None:
            self.mirror.checkpoint(saver.last)
        refused = saver.take_refusal()
        if refused is not None:
            reporter.refused(refused, saver.last or self._resumed, last)
        return refused

    def _open_mirror(self, stack: contextlib.ExitStack, say: Callable[[str], None]) -> None:
        """At the end of the run what is to be copied has been, or somebody was told."""
        if self.config.mirror is None or not self._is_rank0:
            return
        mirror = self.mirror = Mirror(self.config.mirror, self.folder, say)
        stack.callback(mirror.close)
        stack.callback(mirror.copy, "config.yaml", "plan.json", "log-rank0.jsonl", "export", "export-dcp")

    def _fetch(self, say: Callable[[str], None]) -> None:
        """What is to be gone on from and lies in remote storage is brought here."""
        config, there = self.config, self.folder / "checkpoints"
        if is_remote(config.resume):
            fetched = there / config.resume.rstrip("/").rpartition("/")[2]
            if not fetched.exists():
                there.mkdir(parents=True, exist_ok=True)
                fetch_folder(config.resume, fetched)
                say(f"fetched {config.resume}")
        elif config.resume == "never" and config.mirror is not None:
            refuse_used_mirror(config.mirror)
        elif config.resume == "auto" and config.mirror is not None:
            newest = fetch_newest(config.mirror, self.folder)
            if newest is not None:
                say(f"fetched {newest} from {config.mirror}")

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
            stop_file(self.folder).unlink(missing_ok=True)
            self._fetch(say)

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
            found = checkpoint_to_resume(self._resume(), self.folder / "checkpoints", self._meeting, say)
        self._first_step = 1 if found is None else found.step + 1
        say(f"preparing {config.model}: data, graph, weights")
        self.context.slot.enter("capture")
        if config.searches_plan:
            announce(self.context, config.memory_bytes)
        with self._phases.phase("prepare"), self._rank_0_first():
            run = self.run = prepare(
                job.model, job.data, job.eval_data, config, self.context, collate=job.collate, groups=job.groups,
                step=self._first_step, optimizer_class=job.optimizer_class,
            )  # fmt: skip
        self.changes = Changes(config, self.context, self.folder, self._first_step)
        period = self.changes.period
        self.context.slot.enter("compile")
        self.snapshot = Snapshot(config.model_dump(mode="json"), run.model_mark, run.data_mark, run.total_steps)
        if found is not None:
            self.snapshot, self._resumed = restore(found, self.snapshot), found.path
            self.snapshot.passed_over = max(self.snapshot.passed_over, job.passed_over)
            self._require_same_rate()
        how = "the run began" if found is None else "the run went on from a checkpoint"
        self.snapshot.plans.append({"step": self._first_step, "plan": run.plan.shown, "how": how})
        weights, origin = open_weights(job.model, run.spec, config.seed, config.init)

        def read(name: str, is_master: bool, piece: Piece) -> Tensor:
            if found is None:
                return piece.read(weights, name)
            return piece.read(found, f"{'master' if is_master else 'model'}/{name}")

        require_cuda(config.memory_snapshot, run.device.type)
        self.memory = self._memory_guard(period.batch_size, run.batches, searches=True)
        with self._phases.phase("weights"), self.memory.explained("the model's state"):
            opening = Opening(
                run.captured, config.override(batch_size=period.batch_size), self.context, run.trainable,
                load_buffers(run.captured, weights, run.device), job.optimizer_class, run.groups,
                (BoardWatch(self.context.slot),) if self.context.world > 1 else (),
            )  # fmt: skip
            self.session = open_member(opening, run.plan, read, self.memory.look)
            if found is not None and isinstance(self.session, Session):
                self.session.state.restore(found, self.snapshot.optimizer, self.snapshot.loss_scale)
                before = found.state["total_steps"]
                changed = "" if job.lr_function else change_text(config, found.step, before, run.total_steps)
                origin = "; ".join(filter(None, (resumed_text(found, run.total_steps), changed)))
        run = self.run = dataclasses.replace(
            self.run, plan=self.session.plan, choice=self.job.choice or self.run.choice
        )  # fmt: skip
        self.snapshot.plans[-1]["plan"] = run.plan.shown
        if run.choice is not None:
            self.changes.plan = run.plan.full_text
        if isinstance(self.session, Spare):
            return {}  # only rank 0 shows it, which always has a place
        if config.metrics or job.metrics:
            self._open_metrics()
        if config.generate_every:
            self.generator = Generator(run, config, self.context)
        return header(run, opening.config, self.session, origin, self.memory.fit, own_rate=job.lr_function is not None)

    def _open_metrics(self) -> None:
        assert isinstance(self.session, Session)
        job = self.job
        self.metrics = Metrics(
            self.run, self.config, self.session, self.context, job.metrics, job.optimizer_class
        )  # fmt: skip

    def _require_same_rate(self) -> None:
        """A function of the user's own is recognised by the rate of the last step, as far as the run had one."""
        step, was = self.snapshot.step, self.snapshot.own_lr
        now = self._lr(step) if self.job.lr_function is not None and step else None
        if now != was:
            said = ["the options' rate" if rate is None else f"{rate:g} from lr_function" for rate in (was, now)]
            raise ConfigError(
                f"the run cannot go on exactly: step {step} was made with {said[0]}, and would now be with {said[1]}",
                "give the lr_function or scheduler that the run had; or train on from the exported model as a new run",
            )

    def _memory_guard(self, size: int, batches: Batches, searches: bool = False) -> MemoryGuard:
        """searches: where one rank's plan is open, it is chosen by what fits."""

        def first_batch(of: Compiled) -> tuple[Batch, int]:
            first, count = of.part(0, size)
            return batches.batch(first, count), first

        replan = self._replan if searches and self.run.subject is not None and self.context.world == 1 else None
        return MemoryGuard(self.config.memory_bytes, self.run.device, size, first_batch, replan)

    def _replan(self, fit: Fit, look: Callable[[Plan], Fit], budget: Budget | None) -> Plan | None:
        """The plan of a run that leaves it open, on one rank."""
        assert self.run.subject is not None
        choice = choose_alone(self.run.subject, self.context, fit, look, budget)
        self.run = dataclasses.replace(self.run, choice=choice)
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
            if self.config.export_dcp:
                export_dcp(self.session, self.context, self.run.spec, self.folder / "export-dcp")
        reporter.finish(self.folder, exported, self._phases)
        if self.metrics is not None:
            self.metrics.close()
        self.session.close()
        snapshot, saved = self.snapshot, saver.wait() or self._resumed
        best = snapshot.best_step if self.config.keep_best else None
        return Summary(
            snapshot.step, snapshot.loss, snapshot.eval_loss, tuple(reporter.losses), snapshot.skipped, self.folder,
            saved, exported, None if isinstance(self.job.model, nn.Module) else self.run.spec,
            None if best is None else final_folder(self.folder / "checkpoints", best),
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
