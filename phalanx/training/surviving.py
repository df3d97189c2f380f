"""A rank that goes on when others are lost: what it has is held, the next generation of the job meets, and all ranks of
it agree on a step, a plan and where state comes from.

The supervisor says who the ranks are (`launch/membership.py`); nothing else is decided there. What a rank was told
about steps, and what still is to be told, follows the state: a step that counts is reported once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from phalanx.adapt.holdings import Part
from phalanx.adapt.migrate import ChangeRefused
from phalanx.comm import nccl
from phalanx.comm.abandoned import let_go_of_ended
from phalanx.comm.links import Group, Links
from phalanx.engine.compiled import Compiled
from phalanx.engine.step import Outcome
from phalanx.errors import LinkError, PhalanxError, PlanError, counted
from phalanx.launch.context import RankContext
from phalanx.launch.membership import Generation
from phalanx.launch.signals import StopRequest
from phalanx.observe.requests import Request
from phalanx.params.layout_of import StateLayout
from phalanx.plan import fields
from phalanx.plan.plan import Plan
from phalanx.planning.fewer import Order
from phalanx.prepare.deterministic import changes_bits
from phalanx.records import read_record
from phalanx.session.beforehand import prepared
from phalanx.session.held import Held, Word, hold, newest_step, part_told, sums_of
from phalanx.session.restoring import Restoring, lost_with_mirrors, together
from phalanx.session.session import Opening, Session
from phalanx.state.snapshot import Snapshot
from phalanx.training.checkpoints import Checkpoints
from phalanx.training.going_back import RankGoingBack
from phalanx.training.job import Job
from phalanx.training.reporting import Reporter
from phalanx.training.standby import Standby, said_of

_LOOK_SECONDS = 0.005
_JOIN_SECONDS = 3600.0  # for the others to come to the end of a step
_WAIT_SECONDS = 10.0  # between looks for a signal, while there are too few ranks
_GENERATION_SECONDS, _GENERATION_SILENCES = 30.0, 8.0  # at least: for supervisors to publish the next generation


class SurvivingRank(RankGoingBack):
    """lost_save: whether a checkpoint was lost with a rank."""

    lost_save = False

    def __init__(self, job: Job, context: RankContext) -> None:
        super().__init__(job, context)
        self._seconds: dict[str, float] = {}  # that parts of getting together again took
        self.standby = Standby(self)
        self._refused: list[ChangeRefused] = []  # by some rank, of the plans that were tried then

    @property
    def survives(self) -> bool:
        """Whether this rank goes on when another is lost."""
        return self.config.on_loss != "stop" and self.context.membership is not None

    @property
    def whole_plan(self) -> Plan:
        """That of all ranks, of which those for fewer are made."""
        return Plan(**fields.read(self.changes.whole))

    def is_survivable(self, error: PhalanxError) -> bool:
        """Whether it comes from other ranks, and not from this one."""
        return self.survives and (isinstance(error, LinkError) or self.context.abort.reason is not None)

    def survive(
        self, error: PhalanxError, reporter: Reporter, checkpoints: Checkpoints, stop: StopRequest
    ) -> dict[str, Any]:  # fmt: skip
        """Goes on in the next generation of the job, and tells what happened; raises `error` where there is none."""
        self.context.slot.enter("recover")
        self._seconds = {}
        with self._timed("let go"):
            held = hold(self.session, self.at)
            reporter.flush()  # on a GPU the step before is told of later, and all of it is known by now
            saving = checkpoints.break_off()
            self.has_saved = self.has_saved or checkpoints.last is not None
            if self.metrics is not None:
                self.metrics.forget()
        while True:
            with self._timed("wait"):
                context = self._next_generation(stop)
            if context is None:
                raise error
            try:
                return self._meet(context, held, saving, reporter)
            except LinkError as again:
                error = again
                if held is not None:
                    held.state.abandon()

    def _next_generation(self, stop: StopRequest) -> RankContext | None:
        """This rank in the next generation that has enough ranks; those that come prepare themselves for what it has.
        A signal ends the wait: with a generation, or without a supervisor after a moment."""
        was_asked = False
        context = self.context.renewed(max(_GENERATION_SECONDS, _GENERATION_SILENCES * self.config.silence))
        while context is not None and context.membership is not None and context.membership.generation.waits:
            if context.rank == 0:
                self.tell_others(context)
            while (found := context.renewed(_WAIT_SECONDS)) is None and not context.board.aborted:
                if stop.signal is not None and was_asked:
                    break
                was_asked = stop.signal is not None
            context = found
        return context

    @contextlib.contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self._seconds[part] = self._seconds.get(part, 0.0) + time.perf_counter() - begin

    def join(self, reporter: Reporter) -> dict[str, Any]:
        """The part of a rank that was just started in the place of another, or that comes to the others."""
        context, membership = self.context, self.context.membership
        assert membership is not None
        context.slot.enter("compile")
        self.standby.make_for_newcomer(self.whole_plan)
        context.slot.enter("recover")
        if membership.generation.is_ahead:
            waited = context.renewed(_JOIN_SECONDS)
            if waited is None:
                raise LinkError("the run did not take this rank in")
            context = waited
        return self._meet(context, None, False, reporter)

    def tell_others(self, context: RankContext | None = None) -> None:
        """What ranks that come to this generation prepare themselves for."""
        told = json.dumps([self.changes.since, self.session.plan.full_text, self.changes.whole])
        (context or self.context).store.set("plan", told)

    def wait_for_others(self) -> tuple[int, str, str]:
        """Before a rank that was just started prepares anything: a step of the period that the others are in, their
        plan, and that of all ranks."""
        _wait_for(self.context, ["plan"])
        at, plan, whole = json.loads(self.context.store.get("plan"))
        return at, plan, whole

    def _meet(self, context: RankContext, held: Held | None, saving: bool, reporter: Reporter) -> dict[str, Any]:
        """All ranks of a generation, until they can train; what is said of it."""
        assert context.membership is not None
        generation = context.membership.generation
        survived = context.rank not in generation.fresh
        if survived and context.rank == min(set(range(context.world)) - set(generation.fresh)):
            self.tell_others(context)
        with self._timed("start"):
            _until_all_are_there(context, generation)
        links = Links(context, timeout=self.config.timeout)
        try:
            with self._timed("meet"):
                group = links.group(tuple(range(context.world)), "world")
                words = _said(group, self._word(survived, held, saving))
                self._end_step(held, words)
                told = _exchange(group, self._tell(survived, held, words, reporter, context))
            self.has_saved = any(own.get("has_saved") for own in told)
            with self._timed("plan"):
                restoring, chosen = self._planned(context, links, group, words, told)
                self._leave_old_links()
            with self._timed("restore"):
                record = self._restored(restoring, held, words, told)
            reporter.stops, reporter.ends, reporter.changes = told[_best(words)]["asked"]
        except BaseException:
            links.abort()
            raise
        self._enter(context, restoring.plan)
        self.lost_save = any(word.saving for word in words)
        record |= _story(generation, restoring, self.config.on_loss) | chosen | {"parts": self._seconds}
        return record | _refusals(self._refused)

    def _end_step(self, held: Held | None, words: Sequence[Word]) -> None:
        """A step that counts, because another rank has ended it, is ended here, too."""
        newest = newest_step(words)
        if held is not None and held.stepping is not None and held.step == newest - 1:
            sums = sums_of(words, newest)
            if sums is not None and not held.complete(sums):
                held.step = -1  # half an update is no state

    def _word(self, survived: bool, held: Held | None, saving: bool) -> Word:
        damaged = self.mirror.let_go_of_damaged()
        copies = [(copy.step, copy.plan.full_text, copy.rank) for copy in self.mirror.copies]
        if held is None:
            reported = self.snapshot.step if survived else -1
            return Word(survived, reported=reported, saving=saving, copies=copies, damaged=damaged)
        return Word(
            survived, [part_told(part) for part in held.parts], held.step, held.stepping is not None, held.sums,
            self.snapshot.step, saving, copies, damaged,
        )  # fmt: skip

    def _tell(
        self, survived: bool, held: Held | None, words: Sequence[Word], reporter: Reporter, context: RankContext
    ) -> dict[str, Any]:
        """What the others need of this rank, once it has ended what it could."""
        newest = newest_step(words)
        holds = held is not None and held.step == newest
        said: dict[str, Any] = {"holds": holds, "optimizer": {}, "loss_scale": None, "outcome": None, "mirrors": None}
        if held is not None and holds:
            said["damaged"] = held.take_mirror()
            said["optimizer"], said["loss_scale"] = held.state.scalars()
            if held.mirrored is not None:
                said["mirrors"] = part_told(Part(held.plan, held.mirrored.rank))
                said["optimizer"] = held.mirrored.scalars() | said["optimizer"]
            said["outcome"] = held.outcome.values.tolist() if held.outcome is not None else None
        if context.rank == _best(words):
            said["snapshot"], said["records"] = self.snapshot.to_json(), list(reporter.newest)
            said["asked"] = [reporter.stops, reporter.ends, reporter.changes]
        if survived:
            said["order"] = dataclasses.asdict(self.standby.order(self.whole_plan, context.world))
            pending = self.changes.pending
            said["since"], said["pending"] = self.changes.since, pending and dataclasses.asdict(pending)
            said["whole"] = self.changes.whole
            said["copies"], said["saved"], said["has_saved"] = self.mirror.told(), self._saved_step(), self.has_saved
        return said

    def _planned(
        self, context: RankContext, links: Links, group: Group, words: Sequence[Word],
        told: Sequence[Mapping[str, Any]],
    ) -> tuple[Restoring, dict[str, Any]]:  # fmt: skip
        """The first plan for these ranks that none of them refuses, with everything but its state; and what is said of
        the choice."""
        first = next(rank for rank, word in enumerate(words) if word.survived)
        pending = told[first]["pending"]
        self.changes.stay_in(told[first]["since"], pending and Request(**pending))
        self.changes.whole = told[first]["whole"]
        period = self.changes.period
        self.run = dataclasses.replace(self.run, batches=self.run.lengths[period.seq_len])
        config = self.opening.config.override(batch_size=period.batch_size)
        opening = dataclasses.replace(self.opening, context=context, config=config)
        order, was = Order(**told[first]["order"]), Plan(**fields.read(words[first].plan or told[first]["whole"]))
        refused: PhalanxError = PlanError("none was found")
        self._refused = []
        for text in order.plans:
            try:
                plan = self.completed(period, text, context.world)
                had = words[context.rank].survived and isinstance(self.session, Session) and plan == self.session.plan
                compiled, layout = self._compiled(opening, plan, group, had)
            except (ChangeRefused, PlanError) as error:
                refused = error
                self._refused += [error] if isinstance(error, ChangeRefused) else []
                continue
            bits = changes_bits(was, plan) if self.config.deterministic else ()
            chosen = said_of(order, plan) | ({"bits": list(bits)} if bits else {})
            return Restoring(opening, plan, compiled, layout, links, group), chosen
        raise PlanError(
            f"ranks were lost, and there is no plan for {counted(context.world, 'rank')}: {refused.message}",
            "go on with --resume auto and as many ranks as before; or use on_loss=replace",
        )

    def _compiled(self, opening: Opening, plan: Plan, group: Group, had: bool) -> tuple[Compiled | None, StateLayout]:
        """Functions and programs. had: whether this rank already has a place in the plan, which then fits."""
        memory = self._memory_guard(self.changes.period.batch_size, self.run.batches)
        if not had:
            self._leave_old_links()  # which frees their memory
        found = prepared(opening, plan, group, None if had else self.look_at_all(memory))
        if not had:
            self.memory = memory
        return found

    def _leave_old_links(self) -> None:
        """Before anything is computed: communicators of before the loss end in the background."""
        if not nccl.until_given_up(self.config.timeout):
            raise LinkError(f"NCCL did not give up the connections of before the loss within {self.config.timeout:g} s")
        let_go_of_ended()

    def _restored(
        self, restoring: Restoring, held: Held | None, words: Sequence[Word], told: Sequence[Mapping[str, Any]]
    ) -> dict[str, Any]:
        """The session in its new place, and where its state came from."""
        newest, before = newest_step(words), max(word.reported for word in words)
        places = {
            rank: word.place(own["mirrors"])
            for rank, (word, own) in enumerate(zip(words, told, strict=True))
            if own["holds"]
        }
        found = restoring.from_ranks(
            places, held if held is not None and held.step == newest else None,
            together([own for own in told if own["holds"]]),
        )  # fmt: skip
        if isinstance(found, list):
            mirrors = lost_with_mirrors(list(places.values()))
            return self._went_back(restoring, words, told, max(newest, before), found, mirrors)
        self.session = restoring.member(found)
        best = told[_best(words)]
        self._take(Snapshot.from_json(best["snapshot"]))
        self.missed = best["records"]
        self.at, self.unreported = newest + 1, None
        if self.snapshot.step < newest:
            values = next(own["outcome"] for own in told if own["outcome"] is not None)
            self.unreported = newest, Outcome(torch.tensor(values, dtype=torch.float64), None)
        source = "; ".join(["the ranks that were left", *restoring.mirrors])
        return {"step": newest + 1, "source": source, "repeated": 0}

    def _enter(self, context: RankContext, plan: Plan) -> None:
        """From now on as a rank of this generation."""
        self.context, self.opening = context, self.session.opening or self.opening
        self.run = dataclasses.replace(self.run, plan=plan)
        self.changes.enter(context)
        self.changes.plan = plan.full_text
        self.mirror.renew()
        self.folder.enter(context)
        self._open_generator()


def _until_all_are_there(context: RankContext, generation: Generation) -> None:
    """Those that were just started prepare themselves first, however long that takes: nobody connects to them before,
    which has a time limit and on a GPU occupies it. One that ends meanwhile is for the supervisor to see."""
    keys = [f"ready/{rank}" for rank in generation.fresh]
    if context.rank in generation.fresh:
        context.store.set(f"ready/{context.rank}", "")
    _wait_for(context, keys)


def _wait_for(context: RankContext, keys: Sequence[str]) -> None:
    """Until others have written these; raises a LinkError where one of them is lost meanwhile."""
    while keys and not context.store.check(keys):
        time.sleep(_LOOK_SECONDS)


def _best(words: Sequence[Word]) -> int:
    """Of the ranks that are left, the first of those that have told of most steps."""
    return max(range(len(words)), key=lambda rank: (words[rank].survived, words[rank].reported, -rank))


def _said(group: Group, word: Word) -> list[Word]:
    return [read_record(Word, text) for text in group.texts(json.dumps(dataclasses.asdict(word)))]


def _exchange(group: Group, said: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [json.loads(text) for text in group.texts(json.dumps(said))]


def _refusals(refused: Sequence[ChangeRefused]) -> dict[str, Any]:
    """What is said of plans that would have been taken before."""
    traces = "\n".join(error.traceback for error in refused if error.traceback)
    said = {"refused": [error.message for error in refused]} if refused else {}
    return said | ({"traceback": traces} if traces else {})


def _story(generation: Generation, restoring: Restoring, on_loss: str) -> dict[str, Any]:
    """For the log."""
    return {
        "generation": generation.number, "lost": list(generation.lost), "how": on_loss,
        "plan": restoring.plan.shown, "ranks": len(generation.members), "bytes": restoring.bytes,
        "seconds": time.time() - generation.noticed,
    }  # fmt: skip
