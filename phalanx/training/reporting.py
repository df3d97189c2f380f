"""What a run says about itself: one record per step, whatever else happens, the summary; to the log, the display and
callbacks.

On a GPU a step's numbers are read one step late, so that reading them never keeps the device waiting.
"""

from __future__ import annotations

import math
import signal
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from phalanx.engine.step import Outcome
from phalanx.errors import PhalanxError, counted
from phalanx.observe.format import seconds_text
from phalanx.observe.metrics import Meter, peak_memory
from phalanx.observe.phases import Phases
from phalanx.observe.progress import Progress
from phalanx.observe.runlog import RunLog
from phalanx.observe.story import change_words, loss_words, mirror_words
from phalanx.plan.plan import Plan
from phalanx.state.background import SaveFacts
from phalanx.state.saving import StorageError
from phalanx.state.snapshot import Snapshot
from phalanx.training.callbacks import Emit
from phalanx.training.spikes import NUM_RECENT


@dataclass(frozen=True)
class StepFacts:
    """What is known about a step without asking the device."""

    step: int
    samples: int  # consumed, this step included
    lr: float
    unit: str  # what is counted as tokens
    eval_loss: float | None
    eval_values: Mapping[str, float] = field(default_factory=dict[str, float])  # further fields of an evaluation
    most_loss: float | None = None  # with a larger loss, nothing was updated


class Reporter:
    """Keeps the snapshot's counters and passes every finished step on. `losses` are those of this process's steps.

    Every rank has one and comes to the same numbers; only that of rank 0 is shown and calls callbacks.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        meter: Meter,
        log: RunLog,
        progress: Progress,
        emit: Emit,
        device: torch.device,
    ) -> None:
        self.losses: list[float] = []
        self.spike: int | None = None  # the step of one that was reported
        self.ends = False  # whether the run is to end, because a callback asked for it or what follows was `ended`
        self.stops = False  # whether a step that was reported had been asked to be the last
        self.changes = False  # whether one had been asked for another plan
        self._snapshot, self._meter, self._log, self._progress = snapshot, meter, log, progress
        self._emit = emit
        self._saved: Path | None = None
        self._mirrored = ""
        self._device, self._unit = device, "tokens"
        self._waiting: tuple[StepFacts, Outcome] | None = None
        self._mark = time.perf_counter()
        self.paused_seconds = 0.0
        self.prediction: dict[str, Any] = {}  # fields of a record, once they are known
        self.newest: deque[dict[str, Any]] = deque(maxlen=2)  # records of steps
        # A resumed run's totals go on; its rates are those of this process.
        meter.tokens, meter.flops, meter.seconds = snapshot.tokens, snapshot.flops, snapshot.seconds

    def start(self, header: dict[str, Any]) -> None:
        first, total = self._snapshot.step, self._snapshot.total_steps
        self._log.write("start", header=header, config=self._snapshot.config, first_step=first, total_steps=total)
        self._progress.start(header, total, first)
        self._mark = time.perf_counter()

    def step(self, facts: StepFacts, outcome: Outcome) -> None:
        """Takes over a step that was started and reports the newest that is known to be finished."""
        self.flush()
        self._waiting = (facts, outcome)
        if self._device.type != "cuda":
            self.flush()

    def flush(self) -> None:
        """Reports the step that is still waiting, if there is one."""
        if self._waiting is None:
            return
        (facts, outcome), self._waiting = self._waiting, None
        loss, norm, updated = outcome.read()
        self.stops, self.changes = self.stops or outcome.stops(), self.changes or outcome.changes()
        tokens, flops, asked = outcome.counted()
        self.ends = self.ends or bool(asked)
        record = self._record(facts, loss, norm, updated, tokens, flops)
        self._say_step(record)
        self._require_finite(updated)

    def _say_step(self, record: dict[str, Any]) -> None:
        self.losses.append(record["loss"])
        self.newest.append(record)
        self._log.write("step", **record)
        self._progress.step(record)
        self._emit("on_step", record)

    def recovered(self, record: dict[str, Any], missed: Sequence[dict[str, Any]], told: int | None) -> None:
        """Ranks were lost, and this one goes on. missed: records of the newest steps, as another rank has them. told:
        the last step that the run's log tells of, where this rank writes it. Steps from the record's on are undone."""
        kept = [each for each in self.newest if each["step"] < record["step"]]
        self.newest = deque(kept, maxlen=self.newest.maxlen)
        missed = [each for each in missed if each["step"] < record["step"]]
        self.newest.extend(each for each in missed if not self.newest or each["step"] > self.newest[-1]["step"])
        for each in missed if told is not None else ():
            if told is not None and each["step"] > told:
                self._say_step(each)
        meter, snapshot = self._meter, self._snapshot
        meter.tokens, meter.flops, meter.seconds = snapshot.tokens, snapshot.flops, snapshot.seconds
        self._waiting, self.prediction, self._mark = None, {}, time.perf_counter()
        if record["repeated"]:  # what the run was to end or to go back for is undone with its step
            self.ends, self.spike = False, None
        if not snapshot.plans or record["plan"] != snapshot.plans[-1]["plan"]:
            snapshot.plans.append({"step": record["step"], "plan": record["plan"], "how": "ranks were lost"})
        self._log.write("loss", **record)
        self._progress.message(loss_words(record))
        self._emit("on_loss", record)

    def speak_through(self, log: RunLog, progress: Progress) -> None:
        """From now on as another rank."""
        self._log, self._progress = log, progress

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What happens within it does not count as time of a step."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - begin
            self.paused_seconds += seconds
            self._mark += seconds

    def predicted(self, **prediction: Any) -> None:
        """From now on records hold it. Only rank 0 predicts."""
        if prediction:
            self._log.write("prediction", **prediction)
        self.prediction = {name: value for name, value in prediction.items() if name.startswith("predicted_")}

    def changed(self, record: dict[str, Any]) -> None:
        """A change of plan, made or refused. What was predicted of the old one does not hold any more."""
        self._log.write("change", **record)
        if "refused" not in record:
            self.prediction = {}
            self._snapshot.plans.append({name: record[name] for name in ("step", "plan", "how")})
        self._progress.message(change_words(record))
        self._emit("on_change", record)

    def made_ahead(self, step: int, plan: Plan, seconds: float) -> None:
        """A plan for fewer ranks, for when one is lost."""
        self._log.write("ahead", step=step, plan=plan.shown, seconds=seconds)

    def judged(self, step: int, said: Mapping[str, Any], seconds: float) -> None:
        """With which plan fewer ranks would go on, and why."""
        self._log.write("standby", step=step, seconds=seconds, **said)

    def mirrored(self, record: dict[str, Any]) -> None:
        """State was copied into the memory of other ranks, or need not be. Said where it is new."""
        self._log.write("mirror", **record)
        if (words := mirror_words(record)) != self._mirrored:
            self._mirrored = words
            self._progress.message(words)

    def saved(self, path: Path | None, facts: SaveFacts) -> bool:
        """Takes note of the newest complete checkpoint; each is told of once. Whether it is a new one."""
        if path is None or path == self._saved:
            return False
        self._saved = path
        self._log.write("checkpoint", path=str(path), **asdict(facts))
        if not facts.in_background:
            self._progress.message(
                f"{path.name}: the host has no memory free for a copy of the state, so training waited "
                f"{seconds_text(facts.stall_seconds)} until it was written"
            )
        self._emit("on_checkpoint", path)
        return True

    def refused(self, error: StorageError, saved: Path | None, last: bool) -> None:
        """The disk did not take a checkpoint. last: there will be no other step, so the run waits and tries again."""
        self._log.write("not_saved", step=error.step, message=error.message)
        if not last:
            self._snapshot.not_saved(error.step)
        newest = f"the newest checkpoint is {saved}" if saved else "there is no checkpoint yet"
        goes_on = "make room: it is tried again every few seconds" if last else "training goes on and will save again"
        self._progress.message(f"step {error.step}: {error.message}; {newest}; {goes_on}")

    def stopped(self, by: signal.Signals | None, saved: Path | None) -> None:
        """by: the signal that this rank got, None if another rank did."""
        step, total = self._snapshot.step, self._snapshot.total_steps
        name = by.name if by is not None else "a signal"
        self._log.write("stop", signal=name, step=step)
        kept = f"saved in {saved}; go on with --resume auto" if saved else "not saved (checkpoint_every = never)"
        self._progress.message(f"stopped by {name} after step {step} of {total}, {kept}")

    def generated(self, step: int, samples: Sequence[tuple[str, str]]) -> None:
        for prompt, text in samples:
            self._log.write("sample", step=step, prompt=prompt, text=text)
            self._progress.message(f"step {step}, {prompt!r} continued: {text!r}")

    def ended(self, reason: str) -> None:
        """Before its last step, but as wished: what follows is the end of any run, whoever is lost meanwhile."""
        self.flush()
        self.ends = True
        step, total = self._snapshot.step, self._snapshot.total_steps
        self._log.write("ended", step=step, reason=reason)
        self._progress.message(f"ended after step {step} of {total}: {reason}")

    def finish(self, folder: Path, exported: Path | None, phases: Phases) -> None:
        snapshot = self._snapshot
        summary = {"loss": snapshot.loss, "eval_loss": snapshot.eval_loss, "skipped_steps": snapshot.skipped}
        if snapshot.best_step is not None:
            summary |= {"best_eval_loss": snapshot.best_loss, "best_step": snapshot.best_step}
        measured = {name.replace("tokens", self._unit): value for name, value in self._meter.summary().items()}
        measured["memory_bytes"] = peak_memory(self._device)
        summary |= {**measured, **self.prediction, "run": str(folder), "export": exported and str(exported)}
        summary = {name: value for name, value in summary.items() if value is not None}
        self._log.write("finish", **summary, phases=phases.seconds)
        summary["phases"] = phases.describe()
        self._progress.finish(summary)

    def _record(
        self, facts: StepFacts, loss: float, norm: float, updated: bool, tokens: float, flops: float
    ) -> dict[str, Any]:
        self._unit = facts.unit
        now = time.perf_counter()
        seconds, self._mark = max(now - self._mark, 1e-9), now
        rates = self._meter.step(
            facts.step, tokens=int(tokens), flops=flops, seconds=seconds, memory_bytes=peak_memory(self._device)
        )
        snapshot = self._snapshot
        snapshot.step, snapshot.samples, snapshot.loss = facts.step, facts.samples, loss
        snapshot.tokens, snapshot.flops, snapshot.seconds = self._meter.tokens, self._meter.flops, self._meter.seconds
        snapshot.skipped += not updated
        snapshot.skipped_in_a_row = 0 if updated else snapshot.skipped_in_a_row + 1
        record = {"step": facts.step, "samples": facts.samples, "loss": loss, "lr": facts.lr, "grad_norm": norm}
        record |= rates | self.prediction | {"unit": facts.unit}
        if facts.eval_loss is not None:
            record["eval_loss"] = snapshot.eval_loss = facts.eval_loss
            record |= facts.eval_values
        is_spike = facts.most_loss is not None and math.isfinite(loss) and loss > facts.most_loss
        if updated:
            snapshot.recent = [*snapshot.recent, (facts.step, loss)][-NUM_RECENT:]
            return record
        if is_spike:
            record["spike"], self.spike = True, facts.step
            said = (
                f"step {facts.step}: loss {loss:.4g} is a spike (more than {facts.most_loss:.4g}), nothing is updated"
            )
            self._progress.message(said)
        return {**record, "skipped": True}

    def _require_finite(self, updated: bool) -> None:
        in_a_row, allowed = self._snapshot.skipped_in_a_row, self._snapshot.config["max_nonfinite"]
        if not updated and in_a_row > allowed:
            spikes = ", or their losses spikes" if self._snapshot.config["spike_factor"] else ""
            raise PhalanxError(
                f"the gradients of {counted(in_a_row, 'step')} in a row were not finite{spikes}, the last at step "
                f"{self._snapshot.step} (max_nonfinite = {allowed})",
                "lower lr, lengthen warmup_steps or set clip; or look for broken samples at these steps in the run log",
            )
