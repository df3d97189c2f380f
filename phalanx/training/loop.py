"""The training loop of one rank, readable top to bottom: batch → step → evaluate → log → checkpoint.

`Loop.fit` is the whole life of a run as one rank lives it; all ranks live it alike, and rank 0 reports. What is
trained on what is decided in `prepare`, how a step is carried out in `session`, what is said about it in `reporting`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from phalanx.contradictions import asked_too_late
from phalanx.engine.inputs import split
from phalanx.engine.measured import writing
from phalanx.engine.step import Outcome, training_flops
from phalanx.errors import CheckpointError, PhalanxError, counted
from phalanx.lab.rehearsal import rehearse
from phalanx.lab.spec import TIMED
from phalanx.launch.context import RankContext
from phalanx.launch.server import show_output
from phalanx.launch.signals import StopRequest, stop_request
from phalanx.model.separable import require_labels
from phalanx.observe.memory_snapshot import memory_snapshot
from phalanx.observe.metrics import Meter, device_peak_flops
from phalanx.observe.progress import Progress, make_progress
from phalanx.observe.runlog import RunLog, newest_steps, read_log
from phalanx.observe.trace import StepProfiler
from phalanx.observe.trackers import with_trackers
from phalanx.plan.plan import Plan
from phalanx.prepare.deterministic import fixed_kernels
from phalanx.session.exporting import export_dcp, export_model
from phalanx.session.session import Session
from phalanx.session.spare import Spare
from phalanx.state import checkpoint
from phalanx.state.folders import final_folder, replace_text
from phalanx.tasks.base import Batch
from phalanx.training.callbacks import Emit
from phalanx.training.changing_rank import ChangingRank
from phalanx.training.checkpoints import Checkpoints
from phalanx.training.job import Job, Summary, stop_file
from phalanx.training.metrics import perplexity
from phalanx.training.prediction import NUM_STEPS, Predictor
from phalanx.training.reporting import Reporter, StepFacts
from phalanx.training.spikes import RollBack, spike_limit
from phalanx.training.standby import Judged


class Loop(ChangingRank):
    """One rank's part of a job, from its beginning to its end."""

    def __init__(self, job: Job, context: RankContext, emit: Emit) -> None:
        super().__init__(job, context)
        self._emit = emit

    def fit(self) -> Summary:
        """Trains to the end, from the beginning or from a checkpoint.

        Ctrl-C, SIGTERM and SIGHUP end the run after the current step, saved, with KeyboardInterrupt or SystemExit (143,
        129).
        """
        with contextlib.ExitStack() as stack:
            self._stack = stack
            progress = self._progress()
            stack.enter_context(fixed_kernels(self.config, self.context.device))
            is_new = not self._takes_a_place
            rows: dict[str, Any] = {}
            if is_new:
                self.folder.take(stack, progress.message)
                rows = self.set_up(progress.message)
            else:
                self.come_in(*self.wait_for_others())
            log = stack.enter_context(RunLog(self.folder.path, rank=self.context.rank))
            stack.enter_context(_logged_errors(log))
            peak = device_peak_flops(self.run.device, self.config.dtype)
            meter = Meter(total_steps=self.run.total_steps, peak=peak and peak * self.context.world)
            reporter = Reporter(self.snapshot, meter, log, progress, self._emit, self.run.device)
            checkpoints = Checkpoints(self.folder, self.context, reporter, self.phases, self.resumed)
            stack.callback(checkpoints.settle)
            if is_new:
                self._announce(reporter, log, rows)
                for text in asked_too_late(self.config, self.snapshot.step):
                    progress.message(text)
            else:
                was, record = self.context.rank, self.join(reporter)
                progress = progress if self.context.rank == was else self._speak(reporter)
                self._went_on(record, reporter, checkpoints, progress)
            with stop_request(speaks=self.is_rank0) as stop:
                return self._live(reporter, checkpoints, stop)

    @property
    def _takes_a_place(self) -> bool:
        """Whether this rank was started in the place of one that was lost."""
        return self.context.membership is not None and self.context.membership.is_fresh

    def _progress(self) -> Progress:
        """What is shown, by rank 0."""
        config = self.config
        shown = config.progress if self.is_rank0 else "off"
        progress = make_progress(shown, config.json_output and self.is_rank0, config.log_every)
        if self.is_rank0:
            progress = with_trackers(progress, config.report_to, self.folder.path, config.model_dump(mode="json"))
        self._stack.callback(progress.close)
        return progress

    def _announce(self, reporter: Reporter, log: RunLog, rows: dict[str, Any]) -> None:
        self.folder.write_settings(self.run.plan)
        self._emit("on_start")
        reporter.start(rows)
        if self.run.choice is not None:
            choice = self.run.choice
            log.write("plan", plan=choice.plan.text, chosen=choice.how, reason=choice.reason, **choice.record)
        if isinstance(self.session, Session):
            fit = self.memory.fit
            log.write("memory", predicted_bytes=fit.bytes, components=fit.components, on_host=fit.on_host)

    def _live(self, reporter: Reporter, checkpoints: Checkpoints, stop: StopRequest) -> Summary:
        """To the end of the run, whoever is lost on the way if that is to be survived."""
        if self.survives and self.is_rank0:
            self.tell_others()
        self.context.slot.guard(self.survives)
        while True:
            try:
                self._train(reporter, checkpoints, stop)
                return self._end(reporter, checkpoints, stop)
            except PhalanxError as error:
                if not self.is_survivable(error):
                    raise
                was = self.context.rank
                self.forget_coming()
                record = self.survive(error, reporter, checkpoints, stop)
                progress = self._speak(reporter) if self.context.rank != was else None
                self._went_on(record, reporter, checkpoints, progress)

    def _speak(self, reporter: Reporter) -> Progress:
        """Under another number: with the log of that rank, and as rank 0 with all that it shows."""
        if self.is_rank0:
            show_output()
        progress, log = self._progress(), self._stack.enter_context(RunLog(self.folder.path, rank=self.context.rank))
        reporter.speak_through(log, progress)
        return progress

    def _went_on(
        self, record: dict[str, Any], reporter: Reporter, checkpoints: Checkpoints, progress: Progress | None
    ) -> None:
        """After a loss. progress: of a rank that has none to show what went before."""
        told: int | None = None
        if self.is_rank0:
            if progress is not None:
                self.folder.take_over(self._stack, progress.message)
                progress.start({}, self.run.total_steps, self.snapshot.step)
            self.folder.tidy()
            before = newest_steps([*read_log(self.folder.path / "log-rank0.jsonl"), {**record, "kind": "loss"}])
            told = max(before, default=0)
            reporter.losses = [before[step] for step in sorted(before)]
            replace_text(self.folder.path / "plan.json", self.run.plan.to_json() + "\n")
        reporter.recovered(record, self.missed, told)
        self.context.slot.went_on()
        checkpoints.enter(self.context)
        self.context.slot.enter("step")
        self.context.slot.guard(True)

    def _train(self, reporter: Reporter, checkpoints: Checkpoints, stop: StopRequest) -> None:
        """Every step that is left: batch → step → evaluate → log → checkpoint."""
        if self._take_up(reporter, checkpoints, stop):
            return
        self._mirror(self.snapshot.step, reporter)
        self._rehearse()
        predictor = self._predictor()
        ahead = self._ahead(predictor)
        profiled = self.config.profile_steps if self.is_rank0 else None
        with contextlib.closing(StepProfiler(profiled, self.folder.path)) as profiler:
            first_step = since = self.at = self.snapshot.step + 1
            for step in range(first_step, self.run.total_steps + 1):
                self.at = step
                self.context.slot.at_step(step)
                if self.change_plan(step, reporter):
                    since, predictor = step, self._predictor(f" from step {step} on")
                    ahead = self._ahead(predictor)
                    self.mirror.renew()
                    self._mirror(self.snapshot.step, reporter)
                phase = self.phases.phase("first step" if step == first_step else "steps")
                with self._watched(step, profiler, predictor, reporter), phase:
                    outcome = self._step(step, stop)
                self.has_stepped = True
                self.context.slot.finish_step()
                self.context.slot.enter("step")  # the first of them also compiled
                if self._deal_with(step, outcome, reporter, checkpoints, stop, predictor):
                    break
                if step == first_step and self.config.checkpoint_every not in (0, "never"):
                    checkpoints.prepare(self.session)
                self._mirror(step, reporter)
                if step - since >= NUM_STEPS - 1:  # steps before were measured
                    self.make_ready(step, reporter)
                if predictor is None or predictor.was_due:
                    self._make_ahead(step, ahead, reporter)
        if self.is_rank0 and predictor is not None and not predictor.was_due:
            reporter.predicted(no_step_seconds=f"a run of fewer than {NUM_STEPS} steps has none that could be measured")

    def _take_up(self, reporter: Reporter, checkpoints: Checkpoints, stop: StopRequest) -> bool:
        """Does what the loss of a rank left undone of the last step; whether the run ends with it."""
        if self.unreported is not None:
            (step, outcome), self.unreported = self.unreported, None
            if self._deal_with(step, outcome, reporter, checkpoints, stop):
                return True
        elif self.lost_save and self.config.checkpoint_every != "never":
            self._save(checkpoints, reporter)
        self.lost_save = False
        return reporter.stops or reporter.ends

    def _rehearse(self) -> None:
        """In a lab with `compute=timed`."""
        if os.environ.get(TIMED) and isinstance(self.session, Session):
            session = self.session
            rehearse(session.step, session.evaluation, session.connected.world, *self._batch(session, 1))

    @contextlib.contextmanager
    def _watched(
        self, step: int, profiler: StepProfiler, predictor: Predictor | None, reporter: Reporter
    ) -> Iterator[None]:  # fmt: skip
        """A step with what is recorded of it."""
        at = self.folder.path / f"memory-step-{step}-rank{self.context.rank}.pickle"
        predicting = predictor.step(reporter.paused_seconds) if predictor else contextlib.nullcontext()
        memory = memory_snapshot(step, self.config.memory_snapshot, at)
        with profiler.step(step), memory, self._timeline(step), predicting:
            yield

    def _mirror(self, step: int, reporter: Reporter) -> None:
        """After a step: what one rank alone holds is copied into the memory of others, where that is due."""
        if not self.survives or self.config.mirror_every == "never" or not self.mirror.is_due(step):
            return
        reporter.flush()
        with reporter.paused(), self.context.slot.within("save"):
            if said := self.mirror.take(self.session, self.snapshot):
                reporter.mirrored(said)

    def _make_ahead(self, step: int, ahead: Iterator[Plan | Judged | None], reporter: Reporter) -> None:
        began = time.perf_counter()
        with reporter.paused(), self.context.slot.within("compile"):
            found = next(ahead, None)
        if isinstance(found, Plan):
            reporter.made_ahead(step, found, time.perf_counter() - began)
        elif found is not None:
            reporter.judged(step, found, time.perf_counter() - began)

    def _ahead(self, predictor: Predictor | None) -> Iterator[Plan | Judged | None]:
        """What is made for the loss of a rank, where fewer are then to go on."""
        shrinks = self.survives and self.config.on_loss in ("shrink", "regrow")
        return self.standby.made_ahead(self.whole_plan, predictor) if shrinks else iter(())

    def _deal_with(
        self, step: int, outcome: Outcome, reporter: Reporter, checkpoints: Checkpoints, stop: StopRequest,
        predictor: Predictor | None = None,
    ) -> bool:  # fmt: skip
        """Evaluates, tells and saves, as far as that is due after a step; whether it was the last."""
        config = self.config
        evaluated = self._evaluate(step, outcome, reporter) if self._due(step, config.eval_every) else {}
        eval_loss = evaluated.pop("eval_loss", None)
        is_best = eval_loss is not None and self.snapshot.judge(step, eval_loss)
        reporter.step(self._facts(step, eval_loss, evaluated), outcome)
        self._roll_back(checkpoints, reporter, step)
        # Ranks agree within a step; alone there is nobody to agree with. Asked once: a signal between saving
        # and leaving loses no step.
        stopping = reporter.stops or (self.context.world == 1 and stop.signal is not None)
        ending = self._reason_to_end(reporter, evaluated=eval_loss is not None)
        if ending and not stopping:
            reporter.ended(ending)
        if predictor is not None and predictor.is_due:
            with reporter.paused():
                reporter.predicted(**predictor.fields(self.memory.fit.bytes))
        every = config.checkpoint_every
        due = stopping or ending or self.lost_save or (is_best and config.keep_best)
        if every != "never" and (due or self._due(step, every)):
            self._save(checkpoints, reporter)
        if self._due(step, config.generate_every):
            self._generate(step, reporter)
        if stopping or ending or step == self.run.total_steps:
            return True
        checkpoints.tell()
        return False

    def _save_at_last(self, checkpoints: Checkpoints, stop: StopRequest) -> None:
        with self.phases.phase("checkpoint"):
            checkpoints.save_at_last(self.snapshot, self.session, stop, self.config.keep_best)

    def _generate(self, step: int, reporter: Reporter) -> None:
        if self.generator is not None:
            with reporter.paused(), self.context.slot.within("generate"):
                reporter.generated(step, self.generator(self.session, step))

    def _predictor(self, name: str = "") -> Predictor | None:
        session = self.session
        return Predictor(session, self.context, self.config.timeout, name) if isinstance(session, Session) else None

    def _timeline(self, step: int) -> contextlib.AbstractContextManager[None]:
        if step != self.config.timeline_step or not isinstance(self.session, Session):
            return contextlib.nullcontext()
        engine, world = self.session.step.engine, self.session.connected.world
        return writing(engine, self.context, world, self.folder.path / "timeline.json", self.config.timeout)

    def _batch(self, session: Session, step: int) -> tuple[Batch, int]:
        """This rank's part of the batch, and its place in the stream of samples."""
        period = self.changes.period
        first, count = session.part(period.sample_at(step) + self.snapshot.passed_over, period.batch_size)
        return self.run.batches.batch(first, count), first

    def _due(self, step: int, every: int) -> bool:
        return step == self.run.total_steps or bool(every and step % every == 0)

    def _step(self, step: int, stop: StopRequest) -> Outcome:
        run, session = self.run, self.session
        if isinstance(session, Spare):
            return session.step(num_counts=3)
        session.step.number, session.step.commits, session.step.mirroring = step, self.survives, self.mirror.live
        batch, first = self._batch(session, step)
        if run.plan.dp * run.plan.mb * run.plan.multiple > 1:
            require_labels(run.captured, batch, run.plan.shown)
        sizes = split(next(iter(batch.values())).shape[0], run.plan.mb)
        asked = self.is_rank0 and stop_file(self.folder.path).exists()
        counts = (run.task.num_tokens(batch), training_flops(run.captured, batch, sizes), float(asked))
        with self.or_another_plan(), self.memory.explained():
            return session.step(
                batch, first, self.lr(step), counts, stop=lambda: stop.signal is not None,
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
            if self.metrics is not None and isinstance(self.session, Session):
                found |= self.metrics(self.session, batches, samples)
        self._emit("on_evaluate", {"step": step, **found, "eval_samples": samples})
        return found

    def _save(self, checkpoints: Checkpoints, reporter: Reporter) -> None:
        reporter.flush()
        self._roll_back(checkpoints, reporter, self.snapshot.step)  # a spike that a GPU tells of late is not saved
        self.snapshot.own_lr = self.lr(self.snapshot.step) if self.job.lr_function is not None else None
        checkpoints.save(self.snapshot, self.session, self.config.keep_best)

    def _roll_back(self, checkpoints: Checkpoints, reporter: Reporter, step: int) -> None:
        """After a spike, where that was asked for: ends this part of the run, on all ranks; the next goes on from the
        newest checkpoint and leaves the samples since then out."""
        spike, reporter.spike = reporter.spike, None
        newest = checkpoints.newest() if spike is not None and self.config.on_spike == "rollback" else None
        back = checkpoint.open(newest, verify=False).step if newest is not None else 0
        if newest is None or spike is None or back >= spike:
            return  # with nothing to go back to, the spike was skipped
        periods = self.config.periods
        seen = periods.at(step).sample_at(step + 1) - periods.at(back + 1).sample_at(back + 1)
        passed_over = self.snapshot.passed_over + seen
        raise RollBack(
            f"the loss of step {spike} is a spike: going back to {newest.name}, "
            f"and leaving {counted(step - back, 'batch', 'batches')} out",
            passed_over=passed_over, checkpoint=str(newest),
        )  # fmt: skip

    def _reason_to_end(self, reporter: Reporter, evaluated: bool) -> str | None:
        """Why the run is to end before its last step. All ranks come to the same answer."""
        snapshot, patience = self.snapshot, self.config.early_stop
        if reporter.ends:
            return "asked for (stop)"
        if evaluated and patience is not None and snapshot.worse_in_a_row >= patience:
            best = f"{snapshot.best_loss:.4f} of step {snapshot.best_step}" if snapshot.best_step else "a number"
            many = "an evaluation was" if patience == 1 else f"{snapshot.worse_in_a_row} evaluations in a row were"
            return f"{many} not below {best} (early_stop = {patience})"
        return None

    def _facts(self, step: int, eval_loss: float | None, eval_values: Mapping[str, float]) -> StepFacts:
        samples, unit = self.changes.period.sample_at(step + 1) + self.snapshot.passed_over, self.run.task.unit
        return StepFacts(step, samples, self.lr(step), unit, eval_loss, eval_values, self._most_loss(step))

    def _end(self, reporter: Reporter, checkpoints: Checkpoints, stop: StopRequest) -> Summary:
        """Exports and sums up, while the last checkpoint is on its way; or, if the run was stopped, says how to go
        on."""
        self.context.slot.enter("save")
        self.forget_coming()
        asked = reporter.stops or stop.signal is not None
        if asked and self.snapshot.step < self.run.total_steps:
            self._save_at_last(checkpoints, stop)
            reporter.stopped(stop.signal, checkpoints.last)
            self.session.close()
            raise (
                KeyboardInterrupt if stop.signal is signal.SIGINT else SystemExit(128 + (stop.signal or signal.SIGTERM))
            )
        with self.phases.phase("export"):
            exported, failed = self._export()
        self._save_at_last(checkpoints, stop)
        if failed is not None:
            raise failed
        reporter.finish(self.folder.path, exported, self.phases)
        self.session.close()
        snapshot, saved = self.snapshot, checkpoints.newest()
        best, folder = snapshot.best_step if self.config.keep_best else None, self.folder
        return Summary(
            snapshot.step, snapshot.loss, snapshot.eval_loss, tuple(reporter.losses), snapshot.skipped, folder.path,
            saved, exported, None if isinstance(self.job.model, nn.Module) else self.run.spec,
            None if best is None else final_folder(folder.checkpoints, best),
        )  # fmt: skip

    def _export(self) -> tuple[Path | None, CheckpointError | None]:
        """The exported model, or why the disk refused it: that is said once the last checkpoint is there."""
        run, folder, exported = self.run, self.folder.path, None
        try:
            if self.config.export:
                merges = self.config.merge_lora
                exported = export_model(
                    self.session, self.context, run.spec, folder / "export", run.tokenizer, merges=merges
                )
            if self.config.export_dcp:
                export_dcp(self.session, self.context, run.spec, folder / "export-dcp", run.tokenizer)
        except CheckpointError as error:
            return None, error
        return exported, None


@contextlib.contextmanager
def _logged_errors(log: RunLog) -> Iterator[None]:
    try:
        yield
    except RollBack as back:
        log.write("rollback", message=back.message, checkpoint=back.checkpoint, passed_over=back.passed_over)
        raise
    except Exception as error:
        log.write("error", error=type(error).__name__, message=str(error))
        raise
