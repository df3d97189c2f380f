"""A rank that is ready to train: model and data prepared, a plan, its session with the state in place, fresh or as a
checkpoint holds it; and the same under another plan.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from phalanx.data.batches import Batches
from phalanx.engine.compiled import Compiled
from phalanx.errors import ConfigError
from phalanx.launch.context import RankContext
from phalanx.launch.status_board import BoardWatch
from phalanx.model.weights.weights import Weights
from phalanx.observe.memory_snapshot import require_cuda
from phalanx.observe.phases import Phases
from phalanx.params.buckets import Read
from phalanx.params.flat import Piece
from phalanx.params.lr_schedule import change_text, checked_rate, learning_rate
from phalanx.params.parameters import read_order
from phalanx.plan.complete import complete, usable_ranks
from phalanx.plan.periods import Period
from phalanx.plan.plan import Plan
from phalanx.prepare.auto_alone import choose_alone
from phalanx.prepare.budget import Budget, Fit, MemoryGuard
from phalanx.prepare.did_not_fit import LESS, DoesNotFit
from phalanx.prepare.here import announce, measure_here, to_stderr
from phalanx.prepare.initial_weights import load_buffers, open_weights
from phalanx.prepare.prepare import Prepared, prepare, require_change
from phalanx.prepare.turns import rank_0_first
from phalanx.session.ahead import Ahead, FirstBatch, with_functions
from phalanx.session.change import Change, open_member
from phalanx.session.change import change as change_plan
from phalanx.session.session import Look, Opening
from phalanx.session.spare import Member, Spare
from phalanx.state.checkpoint import Checkpoint
from phalanx.state.snapshot import Snapshot, restore, resumed_text
from phalanx.tasks.base import Batch
from phalanx.training.changing import Changes
from phalanx.training.folder import RunFolder
from phalanx.training.generating import Generator
from phalanx.training.header import header, padding_text
from phalanx.training.job import Job
from phalanx.training.metrics import Metrics

_has_run = False  # in this process


@dataclasses.dataclass(frozen=True)
class Coming:
    """A change that is being made ready for. memory: whether it will fit, as far as that is known by now."""

    ahead: Ahead
    memory: MemoryGuard
    batch_size: int


class ReadyRank:
    """One rank's part of a job, before its first step and between any two."""

    run: Prepared
    opening: Opening
    session: Member
    changes: Changes
    memory: MemoryGuard
    metrics: Metrics | None = None
    generator: Generator | None = None
    snapshot: Snapshot
    coming: Coming | None = None
    has_stepped = False

    def __init__(self, job: Job, context: RankContext) -> None:
        self.job, self.context, self.config = job, context, job.config
        self.folder = RunFolder(job.folder, job.config, context)
        self.phases = Phases(job.began)
        self.resumed: Path | None = None  # the checkpoint that the run went on from
        self._costs_known: dict[int | None, list[float]] = {}
        self._foreseen: dict[tuple[int, Batches], WeakKeyDictionary[Compiled, Fit]] = {}  # by size and data of batches

    def set_up(self, say: Callable[[str], None]) -> dict[str, Any]:
        """Prepares the run and puts its state in place, fresh or as a checkpoint holds it; returns the header."""
        config, job = self.config, self.job
        _forget_earlier_runs()
        found = self.folder.to_resume(say)
        say(f"preparing {config.model}: data, graph, weights")
        self._prepare(found, 1 if found is None else found.step + 1, say=say)
        origin = self._open(found)
        run = self.run = dataclasses.replace(self.run, plan=self.session.plan, choice=job.choice or self.run.choice)
        self.snapshot.plans[-1]["plan"], self.changes.whole = run.plan.shown, run.plan.full_text
        if run.choice is not None:
            self.changes.plan = run.plan.full_text
        self._open_generator()
        if isinstance(self.session, Spare):
            return {}  # only rank 0 shows it, which always has a place
        now = config.override(batch_size=self.changes.period.batch_size)
        with self.phases.phase("data"):
            padding = padding_text(run, job, say) if self.context.rank == 0 else ""
        own_rate = job.lr_function is not None
        return header(run, now, self.session, origin, self.memory.fit, own_rate, padding)

    def come_in(self, first_step: int, plan: str, whole: str) -> None:
        """In the place of a rank that was lost: prepares what the others have; what they hold comes from them. whole:
        the plan of all ranks."""
        self._prepare(None, first_step, plan)
        self.changes.whole = whole
        with self.phases.phase("weights"):
            self.opening = self._new_opening()[0]
        self._open_metrics()
        self.memory = self._memory_guard(self.changes.period.batch_size, self.run.batches)

    def _prepare(
        self, found: Checkpoint | None, first_step: int, plan: str | None = None, say: Callable[[str], None] = to_stderr
    ) -> None:
        """Model, data and plan, and where in the run it stands. plan: that of ranks that are already training."""
        config, job, context = self.config, self.job, self.context
        context.slot.enter("capture")
        if config.searches_plan and plan is None:
            announce(context, config.memory_bytes)
            if context.world > 1:  # a rank alone may need no search
                with self.phases.phase("measuring"):
                    measure_here(context, config.dtype, say)
        with self.phases.phase("prepare"), rank_0_first(context) if plan is None else contextlib.nullcontext():
            run = self.run = prepare(
                job.model, job.data, job.eval_data, config, context, collate=job.collate, groups=job.groups,
                step=first_step, optimizer_class=job.optimizer_class, plan=plan, phase=self.phases.phase,
                tried=job.tried,
            )  # fmt: skip
        self.changes = Changes(config, context, self.folder.path, first_step)
        context.slot.enter("compile")
        self.snapshot = Snapshot(config.model_dump(mode="json"), run.model_mark, run.data_mark, run.total_steps)
        if found is not None:
            self.snapshot, self.resumed = restore(found, self.snapshot), found.path
            self.snapshot.passed_over = max(self.snapshot.passed_over, job.passed_over)
            if not config.eval_data:
                self.snapshot.eval_loss = None  # of another time; the end would show it as its own
            self._require_same_rate()
        how = "the run began" if found is None else "the run went on from a checkpoint"
        self.snapshot.plans.append({"step": first_step, "plan": run.plan.shown, "how": how})

    def _open(self, found: Checkpoint | None) -> str:
        """The session, with its state; where that came from."""
        run, job, config, period = self.run, self.job, self.config, self.changes.period
        self._open_metrics()
        require_cuda(config.memory_snapshot, run.device.type)
        self.memory = self._memory_guard(period.batch_size, run.batches, searches=True)
        with self.phases.phase("weights"), self.or_another_plan(), self.memory.explained("the model's state"):
            self.opening, weights, origin = self._new_opening()
            look = self._expecting(self._look(self.memory), weights if found is None else None)
            self.session = open_member(self.opening, run.plan, reader(found, weights), look)
            if found is None or isinstance(self.session, Spare):
                return origin
            self.session.state.restore(found, self.snapshot.optimizer, self.snapshot.loss_scale)
        before = found.state["total_steps"]
        changed = "" if job.lr_function else change_text(config, found.step, before, run.total_steps)
        return "; ".join(filter(None, (resumed_text(found, run.total_steps), changed)))

    def _new_opening(self) -> tuple[Opening, Weights, str]:
        """What sessions of this rank are made of; where initial values come from, and that in words."""
        run, job, config, period = self.run, self.job, self.config, self.changes.period
        weights, origin = open_weights(job.model, run.spec, config.seed, config.init)
        opening = Opening(
            run.captured, config.override(batch_size=period.batch_size), self.context, run.trainable,
            load_buffers(run.captured, weights, run.device), job.optimizer_class, run.groups,
            (BoardWatch(self.context.slot),) if self.context.world > 1 else (),
        )  # fmt: skip
        return opening, weights, origin

    def change(self, period: Period, text: str) -> Change:
        """Another plan, batch size or sample length from now on. Raises `ChangeRefused` or a `PlanError`."""
        batches = self.run.lengths[period.seq_len]
        plan = self.completed(period, text, self.context.world)
        coming = self.coming if self._is_coming(plan, period.batch_size) else None
        memory = coming.memory if coming is not None else self._memory_guard(period.batch_size, batches)
        memory.held = sum(tensor.nbytes for tensor in self.session.state.tensors())
        config, ahead = self.config.override(batch_size=period.batch_size), coming.ahead if coming is not None else None
        try:
            self.session, done = change_plan(self.session, plan, config, self.look_at_all(memory), ahead)
        finally:
            self.forget_coming()
        self.opening = self.session.opening or self.opening
        self.run = dataclasses.replace(self.run, plan=plan, batches=batches)
        self.memory, self.changes.period = memory, period
        return done

    def make_ready_for(self, period: Period, text: str, name: str) -> None:
        """Begins to prepare a change, on all ranks between the same two steps; raises a `PlanError` where there can be
        none. name: see `Ahead`."""
        self.forget_coming()
        plan, batches = self.completed(period, text, self.context.world), self.run.lengths[period.seq_len]
        memory, config = (
            self._memory_guard(period.batch_size, batches),
            self.config.override(batch_size=period.batch_size),
        )
        first_batch = self.first_batch(period.batch_size, batches)
        opening = dataclasses.replace(self.opening, config=config)
        look = lambda compiled: memory.foresee(compiled, opening.compile)  # noqa: E731
        self.coming = Coming(Ahead(self.session, plan, config, name, first_batch, look), memory, period.batch_size)

    def forget_coming(self) -> None:
        if self.coming is not None:
            self.coming.ahead.drop()
        self.coming = None

    def _is_coming(self, plan: Plan, batch_size: int) -> bool:
        """Whether a change was made ready for. All ranks come to the same answer."""
        coming = self.coming
        return coming is not None and coming.ahead.suits(self.session.plan, plan) and coming.batch_size == batch_size

    def _look(self, memory: MemoryGuard) -> Look:
        """What is compiled must fit, and metrics must be possible beside it."""

        def look(compiled: Compiled, compile: Callable[[Plan], Compiled]) -> Compiled:
            chosen = memory.look(compiled, compile)
            if self.metrics is not None:
                self.metrics.under(chosen)
            return chosen

        return look

    def look_at_all(self, memory: MemoryGuard) -> Look:
        """The same of a plan that takes the place of another: its functions must be possible, too."""
        return with_functions(self._look(memory), memory.batch)

    def _expecting(self, look: Look, weights: Weights | None) -> Look:
        """The same; and of weights that are computed it is known then which will be asked for."""
        began = time.perf_counter()

        def seen(compiled: Compiled, compile: Callable[[Plan], Compiled]) -> Compiled:
            chosen = look(compiled, compile)
            self.phases.since("functions", began)
            if weights is not None:
                weights.expect(read_order(chosen.formation.state, chosen.rank))
            return chosen

        return seen

    def completed(self, period: Period, text: str, world: int) -> Plan:
        """A plan that the run can go on with, with nothing left open."""
        usable, costs = usable_ranks(text, world), self._costs(period.seq_len)
        plan = complete(text, world=usable, batch_size=period.batch_size, costs=costs, slot=self.config.slot).plan
        require_change(self.run, self.config, plan)
        return plan

    def _costs(self, seq_len: int | None) -> list[float]:
        """Of every block, for samples of a length that the data comes in."""
        if seq_len not in self._costs_known:
            captured, sample = self.run.captured, self.run.lengths[seq_len].batch(0, 1)
            self._costs_known[seq_len] = [float(flops) for flops in captured.blocks.flops(captured.dims(sample))]
        return self._costs_known[seq_len]

    def lr(self, step: int) -> float:
        if self.job.lr_function is not None:
            return checked_rate(self.job.lr_function, step)
        return learning_rate(self.config, step, self.run.total_steps)

    def _open_metrics(self) -> None:
        if self.config.metrics or self.job.metrics:
            self.metrics = Metrics(self.run, self.config, self.job.metrics)

    def _open_generator(self) -> None:
        if self.config.generate_every:
            self.generator = Generator(self.run, self.config, self.context)

    def _require_same_rate(self) -> None:
        """A function of the user's own is recognised by the rate of the last step, as far as the run had one."""
        step, was = self.snapshot.step, self.snapshot.own_lr
        now = self.lr(step) if self.job.lr_function is not None and step else None
        if now != was:
            said = ["the options' rate" if rate is None else f"{rate:g} from lr_function" for rate in (was, now)]
            raise ConfigError(
                f"the run cannot go on exactly: step {step} was made with {said[0]}, and would now be with {said[1]}",
                "give the lr_function or scheduler that the run had; or train on from the exported model as a new run",
            )

    def _memory_guard(self, size: int, batches: Batches, searches: bool = False) -> MemoryGuard:
        """searches: where one rank's plan is open, it is chosen by what fits."""
        replan = self._replan if searches and self.run.subject is not None and self.context.world == 1 else None
        first_batch, foreseen = (
            self.first_batch(size, batches),
            self._foreseen.setdefault((size, batches), WeakKeyDictionary()),
        )
        return MemoryGuard(
            self.config.memory_bytes, self.run.device, size, first_batch, replan, foreseen=foreseen
        )  # fmt: skip

    def foresee(self, compiled: Compiled) -> None:
        """What memory a plan takes that may come in this period."""
        guard = self._memory_guard(self.changes.period.batch_size, self.run.batches)
        guard.foresee(compiled, self.opening.compile)

    def first_batch(self, size: int, batches: Batches) -> FirstBatch:
        """This rank's part of the first batch of so many samples, under whatever plan."""

        def part(of: Compiled) -> tuple[Batch, int]:
            first, count = of.part(0, size)
            return batches.batch(first, count), first

        return part

    def _replan(self, fit: Fit, look: Callable[[Plan], Fit], budget: Budget | None) -> Plan | None:
        """The plan of a run that leaves it open, on one rank."""
        assert self.run.subject is not None
        choice = choose_alone(self.run.subject, self.context, fit, look, budget)
        self.run = dataclasses.replace(self.run, choice=choice)
        return choice and choice.plan

    @contextlib.contextmanager
    def or_another_plan(self) -> Iterator[None]:
        """What does not fit within it is told with how much memory is left to plan with, where a plan is open."""
        try:
            yield
        except DoesNotFit as error:
            error.share = None if self.has_stepped else self._share_left()
            raise

    def _share_left(self) -> float | None:
        """Of the memory there is, less than what the plan was thought to need; None where the search cannot tell."""
        choice, memory = self.run.choice, self.memory
        if self.run.subject is None or choice is None:
            return None
        if self.context.world == 1:
            return LESS * memory.fit.bytes / memory.budget.bytes if memory.budget is not None else None
        planned, budget = (choice.record.get(f"planned_{name}_bytes") for name in ("memory", "budget"))
        return LESS * self.job.tried.share * planned / budget if planned and budget else None


def reader(found: Checkpoint | None, weights: Weights) -> Read:
    """The values that a rank begins with: of a checkpoint, else the initial ones."""

    def read(name: str, is_master: bool, piece: Piece) -> Tensor:
        if found is None:
            return piece.read(weights, name)
        return piece.read(found, f"{'master' if is_master else 'model'}/{name}")

    return read


def _forget_earlier_runs() -> None:
    """Their tensors may still be there: what holds a run together refers to each other, and Python looks for such
    cycles only when it has made many objects, however large they are."""
    global _has_run
    if _has_run:
        gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()
    _has_run = True
