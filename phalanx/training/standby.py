"""What fewer ranks go on with when one or two are lost: the order in which plans for them are tried, and the first of
these with its programs and functions, made between steps while nothing is wrong.

Rank 0 puts plans in order by what the run knows of itself (`planning/fewer.py`) and tells the others. Fewer ranks have
larger parts of a batch, and micro-batches of other sizes need other functions. Making them is nearly all that going on
with fewer ranks takes; made ahead, they are found where they would be put (`Opening.remembered`). After a loss one rank
says in which order plans are tried, and all try them.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any, TypeVar

from phalanx.errors import PhalanxError, PlanError
from phalanx.observe.format import seconds_text
from phalanx.plan import fields
from phalanx.plan.plan import AXES, Plan
from phalanx.planning.fewer import Known, Order, candidates, in_order, ranked
from phalanx.predict.own_steps import by_own_steps
from phalanx.prepare.auto import Subject, known_of, whole_model, work_of
from phalanx.prepare.deterministic import changes_bits
from phalanx.prepare.here import announce, are_announced, planned_here
from phalanx.records import read_record
from phalanx.session.ahead import functions
from phalanx.training.prediction import Predictor
from phalanx.training.ready import ReadyRank

T = TypeVar("T")
_MOST_LOST = 2  # ranks, for which plans are made ahead
_TOO_EARLY = "no plan was judged yet"
_OF_THE_MESH = (*AXES, "mb", "stages")  # which other ranks decide anew
_SHOWN = 4  # plans with their seconds, in records
Judged = Mapping[str, Any]  # what is said of an order that was found


class Standby:
    """One rank's part."""

    def __init__(self, ready: ReadyRank) -> None:
        self._ready = ready
        self._orders: dict[str, Order] = {}  # also of before a loss, for one that follows soon

    def order(self, whole: Plan, left: int) -> Order:
        """In which so many ranks try plans, as far as it is known by now. whole: that of all ranks."""
        if whole.world <= left:
            return Order([whole.full_text])
        return self._orders.get(self._key(whole, left)) or self.usual(whole, left)

    def usual(self, whole: Plan, left: int, why_not: str = _TOO_EARLY) -> Order:
        """The same, whatever is known: alike on all ranks at any time."""
        return Order(in_order(whole, left, keeps=self._keeps(whole)), why_not=why_not)

    def made_ahead(self, whole: Plan, predictor: Predictor | None) -> Iterator[Plan | Judged | None]:
        """What rank 0 says of the orders that it finds, and each plan that was made for a number that this rank would
        have in it. One at a time, so that no pause is long; None where others are not so far. predictor: of this
        session."""
        _if_it_can(partial(announce, self._ready.context, self._ready.config.memory_bytes))
        return self._pieces(whole, predictor)

    def _pieces(self, whole: Plan, predictor: Predictor | None) -> Iterator[Plan | Judged | None]:
        world, rank = self._ready.context.world, self._ready.context.rank
        numbers = [world - lost for lost in range(1, min(_MOST_LOST, world - 1) + 1)]
        fewer = [left for left in numbers if left < whole.world]
        yield from self._judged(whole, fewer, predictor) if rank == 0 else self._heard(whole, fewer)
        for left in numbers:
            places = range(max(0, rank - (world - left)), min(rank, left - 1) + 1)
            yield from _made_for(self._ready, self.order(whole, left).plans, left, places)

    def make_for_newcomer(self, whole: Plan) -> None:
        """What this rank, which was just started, computes with, while nobody waits for it in the middle of
        something."""
        world, rank = self._ready.context.world, self._ready.context.rank
        for _ in _made_for(self._ready, self.order(whole, world).plans, world, range(rank, rank + 1)):
            pass

    # Which plans.

    def _judged(self, whole: Plan, numbers: Iterable[int], predictor: Predictor | None) -> Iterator[Judged | None]:
        """On rank 0. Nothing that is found out here may end a run that is sound."""
        store = self._ready.context.store
        while not _if_it_can(partial(are_announced, self._ready.context)):
            yield None
        known = _or_why(partial(self._known, predictor))
        yield None
        for left in numbers:
            found = known if isinstance(known, str) else _or_why(partial(self._ranked, whole, left, known))
            order = self.usual(whole, left, found) if isinstance(found, str) else found
            self._orders[self._key(whole, left)] = order
            _if_it_can(partial(store.set, self._key(whole, left), json.dumps(asdict(order))))
            yield {"ranks": left, **_first_of(order)}

    def _heard(self, whole: Plan, numbers: Iterable[int]) -> Iterator[None]:
        """On all others."""
        store = self._ready.context.store
        for left in numbers:
            key = self._key(whole, left)
            while not _if_it_can(partial(store.check, [key])):
                yield None
            if (text := _if_it_can(partial(store.get, key))) is not None:
                self._orders[key] = read_record(Order, text)

    def _known(self, predictor: Predictor | None) -> Known:
        """What the run's own steps say, else a profile, else what is published or assumed of the devices that are
        here."""
        ready, run = self._ready, self._ready.run
        config, batch = ready.config, ready.changes.period.batch_size
        subject = Subject(
            run.spec, run.captured, run.trainable, run.batches, config, run.plan, ready.job.optimizer_class
        )  # fmt: skip
        cluster, software = planned_here(ready.context, config.memory_bytes, config.dtype)
        work = work_of(subject, whole_model(subject, run.device), cluster.per_node, "light" in run.plan.policies)
        known = Known(work, cluster, software, batch, known_of(cluster, work))
        seen = None if predictor is None else predictor.seen
        return known if seen is None else by_own_steps(known, seen.programs, seen.reports, seen.step_seconds)

    def _ranked(self, whole: Plan, left: int, known: Known) -> Order:
        ready = self._ready
        plans = candidates(whole, left, known.batch, lambda text: ready.completed(ready.changes.period, text, left))
        lost = ready.context.world - left
        found = ranked(known, plans, ready.session.plan, lost, lambda plan: self._leaves_out(whole, plan))
        texts = in_order(whole, left, [plan for plan, _ in found], self._keeps(whole))
        return Order(texts, {plan.full_text: seconds for plan, seconds in found}, known.by)

    def _leaves_out(self, whole: Plan, plan: Plan) -> int:
        """How much a plan does not keep of what the user gave; most of all the bits of a deterministic run."""
        given = fields.read(self._ready.changes.period.plan).keys() - set(_OF_THE_MESH)
        left_out = sum(getattr(plan, name) != getattr(whole, name) for name in given)
        is_other = self._ready.config.deterministic and bool(changes_bits(whole, plan))
        return left_out + (len(given) + 1) * is_other

    def _keeps(self, whole: Plan) -> Callable[[str], bool] | None:
        return partial(_keeps_bits, whole) if self._ready.config.deterministic else None

    def _key(self, whole: Plan, left: int) -> str:
        period = self._ready.changes.period
        return f"plans/{left}/{period.batch_size}/{period.seq_len}/{whole.full_text}"


def _if_it_can(ask: Callable[[], T]) -> T | None:
    """What the store says; nothing where it cannot be asked: whoever is lost then is met in the next step."""
    try:
        return ask()
    except Exception:
        return None


def _or_why(make: Callable[[], Any]) -> Any:
    """What is made, or why it cannot be."""
    try:
        return make()
    except PhalanxError as error:
        return error.message
    except Exception as error:  # whatever a model of the user's own leads to
        return f"{type(error).__name__}: {error}"


def _keeps_bits(whole: Plan, text: str) -> bool:
    with contextlib.suppress(PlanError):  # of one that cannot be
        return not changes_bits(whole, Plan(**fields.read(text)))
    return False


def _first_of(order: Order) -> dict[str, Any]:
    text = order.plans[0]
    if text not in order.seconds:
        return {"plan": text, "chosen": f"not by its seconds: {order.why_not}"}
    first = Plan(**fields.read(text))
    return {"plan": first.shown, **said_of(order, first)}


def said_of(order: Order, plan: Plan) -> dict[str, Any]:
    """What records say of the choice of a plan: why it is this one, and the seconds of the first few."""
    if not order.seconds:
        return {"chosen": f"not by its seconds: {order.why_not}"} if order.why_not else {}
    first = [(Plan(**fields.read(text)), seconds) for text, seconds in list(order.seconds.items())[:_SHOWN]]
    predicted = [{"plan": own.shown, "step_seconds": seconds} for own, seconds in first]
    return {"chosen": f"{_words(order, plan, first)}, {order.by}", "predicted": predicted}


def _words(order: Order, plan: Plan, first: list[tuple[Plan, float]]) -> str:
    seconds = order.seconds.get(plan.full_text)
    if seconds is None:
        return f"none of those that were judged could be had, the first {first[0][0].shown}"
    words = f"predicted {seconds_text(seconds)} a step"
    other = next((own for own in first if own[0] != plan), None)
    if other is None:
        return words
    words += f", {other[0].shown} {seconds_text(other[1])}"
    if first[0][0] != plan:
        return f"{words}, which could not be had"
    return words + (", which moves more or keeps less of what was given" if other[1] <= seconds else "")


# Their functions.


def _made_for(ready: ReadyRank, plans: Iterable[str], left: int, numbers: range) -> Iterator[Plan]:
    for text in plans:
        try:
            plan = ready.completed(ready.changes.period, text, left)
            for number in numbers:
                if number < plan.world:
                    _make(ready, plan, number)
                    yield plan
            return
        except Exception:  # it would not do after a loss either; and nothing made ahead may end a run that is sound
            continue


def _make(ready: ReadyRank, plan: Plan, number: int) -> None:
    compiled, period = ready.opening.remembered(plan, number), ready.changes.period
    for _ in functions(compiled, ready.first_batch(period.batch_size, ready.run.batches)):
        pass
    ready.foresee(compiled)
