"""The training loop of one rank, readable top to bottom: batch → step → evaluate → log → checkpoint.

`Loop.fit` is the whole life of a run as one rank lives it; all ranks live it alike, and rank 0 reports. What is
trained on what is decided in `prepare`, how a step is carried out in `runtime`, what is said about it in `reporting`.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.engine.inputs import split
from phalanx.engine.measured import writing
from phalanx.engine.out_of_memory import explain_out_of_memory, model_needs, step_needs
from phalanx.engine.rank import Rank
from phalanx.engine.step import Outcome, training_flops
from phalanx.errors import PhalanxError
from phalanx.lab.rehearsal import rehearse
from phalanx.lab.spec import TIMED
from phalanx.launch.context import RankContext
from phalanx.launch.signals import StopRequest, stop_request
from phalanx.launch.status_board import BoardWatch
from phalanx.model.zoo.zoo import build
from phalanx.observe.metrics import Meter, device_peak_flops
from phalanx.observe.progress import make_progress
from phalanx.observe.runlog import RunLog
from phalanx.observe.trace import StepProfiler
from phalanx.params.flat import Piece
from phalanx.params.gather_full import gather_full
from phalanx.params.lr_schedule import change_text, learning_rate
from phalanx.params.state_shards import from_checkpoint
from phalanx.state.checkpoint import Checkpoint
from phalanx.state.huggingface import export
from phalanx.state.rendezvous import StoreRendezvous
from phalanx.state.saving import AsyncSaver
from phalanx.state.snapshot import Snapshot, checkpoint_to_resume, restore, resumed_text
from phalanx.tasks.base import Batch
from phalanx.training.job import Job, Summary
from phalanx.training.prepare import Prepared, load_buffers, open_weights, prepare
from phalanx.training.reporting import Emit, Reporter, StepFacts, header

_has_run = False  # in this process


class Loop:
    """One rank's part of a job."""

    run: Prepared
    rank: Rank
    snapshot: Snapshot

    def __init__(self, job: Job, context: RankContext, emit: Emit) -> None:
        self.job, self.context, self._emit = job, context, emit
        self.config, self.folder = job.config, job.folder
        self._is_rank0 = context.rank == 0
        self._resumed: Path | None = None  # the checkpoint that the run went on from

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
            with stop_request(is_tp_leader=self._is_rank0) as stop:
                self._train(reporter, saver, stop)
            return self._end(reporter, saver, stop)

    def _train(self, reporter: Reporter, saver: AsyncSaver, stop: StopRequest) -> None:
        """Every step that is left: batch → step → evaluate → log → checkpoint."""
        config, slot = self.config, self.context.slot
        profiled = config.profile_steps if self._is_rank0 else None
        if os.environ.get(TIMED):
            rehearse(self.rank, *self._batch(1))
        with contextlib.closing(StepProfiler(profiled, self.folder)) as profiler:
            for step in range(self.snapshot.step + 1, self.run.total_steps + 1):
                slot.at_step(step)
                batch, first = self._batch(step)
                with profiler.step(step), self._timeline(step):
                    outcome = self._step(batch, first, step, stop)
                slot.enter("step")  # the first of them also compiled
                eval_loss = self._evaluate(step, outcome, reporter) if self._due(step, config.eval_every) else None
                reporter.step(self._facts(step, eval_loss), outcome)
                # Ranks agree within a step; alone there is nobody to agree with. Asked once: a signal between saving
                # and leaving loses no step.
                stopping = reporter.stops or (self.context.world == 1 and stop.signal is not None)
                if stopping or self._due(step, config.checkpoint_every):
                    self._save(saver, reporter)
                reporter.saved(saver.last)
                if stopping:
                    break
            slot.enter("save")
            reporter.saved(saver.wait())

    def _timeline(self, step: int) -> contextlib.AbstractContextManager[None]:
        if step != self.config.timeline_step:
            return contextlib.nullcontext()
        return writing(self.rank, self.folder / "timeline.json", self.config.timeout)

    def _batch(self, step: int) -> tuple[Batch, int]:
        """This rank's part of the batch, and its place in the stream of samples."""
        size = self.config.batch_size
        first, count = self.rank.part((step - 1) * size, size)
        return self.run.batches.batch(first, count), first

    def _due(self, step: int, every: int) -> bool:
        return step == self.run.total_steps or bool(every and step % every == 0)

    def _lr(self, step: int) -> float:
        return learning_rate(self.config, step, self.run.total_steps)

    def _step(self, batch: Batch, first: int, step: int, stop: StopRequest) -> Outcome:
        run = self.run
        sizes = split(next(iter(batch.values())).shape[0], run.plan.mb)
        counts = (run.task.num_tokens(batch), training_flops(run.captured, batch, sizes))
        with explain_out_of_memory(*step_needs(run.plan, self.config.batch_size), run.device):
            return self.rank.step(batch, first, self._lr(step), counts, stop=lambda: stop.signal is not None)

    def _evaluate(self, step: int, outcome: Outcome, reporter: Reporter) -> float | None:
        """The loss on the evaluation data, always on the same samples, without dropout."""
        batches = self.run.eval_batches
        if batches is None:
            return None
        outcome.read()  # so that the step's time is not taken for the evaluation's
        samples = min(self.config.eval_samples, batches.num_samples or self.config.eval_samples)
        with reporter.paused(), self.context.slot.within("evaluate"):
            needs = step_needs(self.run.plan, self.config.batch_size)
            with explain_out_of_memory(*needs, self.run.device):
                loss = self.rank.evaluate(batches, samples)
        self._emit("on_evaluate", {"step": step, "eval_loss": loss, "eval_samples": samples})
        return loss

    def _facts(self, step: int, eval_loss: float | None) -> StepFacts:
        return StepFacts(step, step * self.config.batch_size, self._lr(step), self.run.task.unit, eval_loss)

    def _saver(self) -> AsyncSaver:
        context = self.context
        meeting = StoreRendezvous(context.store, context.rank) if context.world > 1 else None
        saver = AsyncSaver(
            self.folder / "checkpoints", self.config.keep_checkpoints, rank=context.rank, world=context.world,
            rendezvous=meeting,
        )  # fmt: skip
        context.abort.listen(saver.give_up)
        return saver

    def _save(self, saver: AsyncSaver, reporter: Reporter) -> None:
        reporter.flush()
        with reporter.paused(), self.context.slot.within("save"):
            self.snapshot.optimizer = self.rank.optimizer.scalars()
            self.snapshot.loss_scale = self.rank.loss_scale.state() if self.rank.loss_scale else None
            saver.save(self.snapshot.step, self.rank.state_shards(), self.snapshot.to_json())

    def _set_up(self, say: Callable[[str], None]) -> dict[str, Any]:
        """Prepares the run and puts its state in place, fresh or as a checkpoint holds it; returns the header."""
        config, job = self.config, self.job
        _forget_earlier_runs()
        # One rank reads every byte; if that fails, it ends all.
        found = checkpoint_to_resume(config.resume, self.folder / "checkpoints", verify=self.context.rank == 0)
        say(f"preparing {config.model}: data, graph, weights")
        self.context.slot.enter("capture")
        with self._rank_0_first():
            run = self.run = prepare(job.model, job.data, job.eval_data, config, self.context, collate=job.collate)
        self.context.slot.enter("compile")
        self.snapshot = Snapshot(config.model_dump(mode="json"), run.model_mark, run.data_mark, run.total_steps)
        if found is not None:
            self.snapshot, self._resumed = restore(found, self.snapshot), found.path
        weights, origin = open_weights(job.model, run.spec, config.seed, config.init)

        def read(name: str, is_master: bool, piece: Piece) -> Tensor:
            if found is None:
                return piece.read(weights, name)
            return piece.read(found, f"{'master' if is_master else 'model'}/{name}")

        with explain_out_of_memory(*model_needs(config.dtype), run.device):
            self.rank = Rank(
                run.captured, config, run.plan, context=self.context, trainable=run.trainable, read=read,
                buffers=load_buffers(run.captured, weights, run.device), optimizer_class=job.optimizer_class,
                watches=[BoardWatch(self.context.slot)] if self.context.world > 1 else [],
            )  # fmt: skip
            if found is not None:
                self._restore(found)
                before = found.state["total_steps"]
                changed = change_text(config, found.step, before, run.total_steps)
                origin = "; ".join(filter(None, (resumed_text(found, run.total_steps), changed)))
        return header(run, config, self.rank, origin)

    def _restore(self, found: Checkpoint) -> None:
        """The optimizer's state and the scale of the loss, as far as they concern this rank."""
        keys = (name.split("/", 2) for name in found.names() if name.startswith("optimizer/"))
        read = partial(from_checkpoint, found)
        self.rank.restore_optimizer([(slot, name) for _, slot, name in keys], read, self.snapshot.optimizer)
        if self.rank.loss_scale is not None and self.snapshot.loss_scale is not None:
            self.rank.loss_scale.load(self.snapshot.loss_scale)

    @contextlib.contextmanager
    def _rank_0_first(self) -> Iterator[None]:
        """Others wait, and find in the caches what rank 0 put there."""
        store, key = self.context.store, "prepared"
        if self.context.world > 1 and self.context.rank > 0:
            while not store.check([key]):
                if self.context.abort.wait(0.05):
                    raise PhalanxError(f"stopped while preparing: {self.context.abort.reason}")
        yield
        if self.context.world > 1 and self.context.rank == 0:
            store.set(key, "yes")

    def _write_settings(self) -> None:
        self.config.save(self.folder / "config.yaml")
        (self.folder / "plan.json").write_text(self.run.plan.to_json() + "\n", encoding="utf-8")

    def _end(self, reporter: Reporter, saver: AsyncSaver, stop: StopRequest) -> Summary:
        """Exports and sums up; or, if the run was stopped, says how to go on."""
        asked = reporter.stops or stop.signal is not None
        if asked and self.snapshot.step < self.run.total_steps:
            reporter.stopped(stop.signal, saver.last)
            self.rank.close()
            raise (
                KeyboardInterrupt if stop.signal is signal.SIGINT else SystemExit(128 + (stop.signal or signal.SIGTERM))
            )
        exported = self._export() if self.config.export else None
        reporter.finish(self.folder, exported)
        self.rank.close()
        snapshot, saved = self.snapshot, saver.wait() or self._resumed
        assert saved is not None, "the last step is always saved, and a run that had none left went on from it"
        return Summary(
            snapshot.step, snapshot.loss, snapshot.eval_loss, tuple(reporter.losses), snapshot.skipped, self.folder,
            saved, exported, None if isinstance(self.job.model, nn.Module) else self.run.spec,
        )  # fmt: skip

    def _export(self) -> Path:
        """Rank 0 writes; the others hand it what they hold, one tensor at a time."""
        spec = self.run.spec
        tensors = gather_full(
            self.rank.formation.state.all_parameters(), self.rank.values(), self.context, self.run.device
        )
        folder = self.folder / "export"
        if not self._is_rank0:
            for _ in tensors:
                raise AssertionError("only rank 0 gets tensors")
            return folder
        return export(
            folder, model=build(spec, device="meta"), tensors=tensors, config=spec.config,
            tokenizer=self.run.tokenizer, base_folder=spec.folder,
        )  # fmt: skip


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
def _logged_errors(log: RunLog) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        log.write("error", error=type(error).__name__, message=str(error))
        raise
