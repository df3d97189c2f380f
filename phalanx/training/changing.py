"""When a run changes its plan, and to which: by its options from a step on, or because somebody asks while it runs.

All ranks come to the same answer between the same two steps: what the options say they all know, and that rank 0 was
asked travels in the reduction of every step. How a plan is changed is `session/change.py`'s work.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from phalanx.config import RunConfig
from phalanx.errors import LinkError, PhalanxError, PlanError
from phalanx.launch.context import RankContext
from phalanx.observe.requests import Answer, Inbox, Request
from phalanx.plan import fields
from phalanx.plan.complete import least_ranks
from phalanx.plan.periods import Period
from phalanx.session.change import everyone
from phalanx.session.spare import Member

SCHEDULED, ASKED = "as the options say", "asked for while it ran"
_MEET = "meet"


class OthersWait(LinkError):
    """Ranks leave each other to meet again in another generation, with those that came."""


@dataclass(frozen=True)
class Wanted:
    """plans: in the order in which they are tried; what nothing is lost without is tried once. must: whether one of
    them has to be taken, because batches or samples change with it. later: it is only to be made ready for, and wanted
    again when all ranks are."""

    period: Period
    plans: tuple[str, ...]
    how: str
    must: bool = False
    request: Request | None = None
    later: bool = False

    @property
    def name(self) -> str:
        return self.request.name if self.request is not None else f"step{self.period.step}"


class Changes:
    """`plan` is the text of the plan in force, `whole` of that which all ranks had, `period` the period, `since` a step
    of it."""

    def __init__(self, config: RunConfig, context: RankContext, folder: Path, step: int) -> None:
        self._periods, self._context = config.periods, context
        self.period, self.since = self._periods.at(step), step
        self.plan = self.whole = self.period.plan
        self._inbox = Inbox(folder)
        self._coming: Request | None = None  # what all ranks make ready for
        self._waiting: Request | None = None  # what was taken, and all ranks do not make ready for
        self._ready = False
        takes_a_place = context.membership is not None and context.membership.is_fresh
        if context.rank == 0 and not takes_a_place:
            self._inbox.clear()

    @property
    def pending(self) -> Request | None:
        """What was taken and is not answered."""
        return self._coming or self._waiting

    def enter(self, context: RankContext) -> None:
        """From now on as this rank, in another generation, where nothing is ready."""
        self._context = context
        self._waiting, self._coming = self.pending, None

    def stay_in(self, since: int, pending: Request | None) -> None:
        """After a loss ranks are in the period in which those that are left were; what comes next is changed to, and
        what they were asked for is wanted still."""
        self.period, self.since = self._periods.at(since), since
        self._waiting, self._coming = pending, None

    def is_asked(self) -> bool:
        """Whether this rank has a request that can be dealt with, or others wait to be taken in."""
        if self._context.rank != 0:
            return False
        if self._coming is not None:
            return self._is_invited or self._all_ready()
        return self._is_invited or self._waiting is not None or self._inbox.has_request()

    def tell_ready(self) -> None:
        """This rank has made ready for what was asked."""
        if self._coming is not None and not self._ready:
            self._ready = True
            if self._context.world > 1:
                self._context.store.set(f"ready/{self._coming.name}/{self._context.rank}", "yes")

    def _all_ready(self) -> bool:
        assert self._coming is not None
        keys = [f"ready/{self._coming.name}/{rank}" for rank in range(self._context.world)]
        return self._ready and (len(keys) == 1 or self._context.store.check(keys))

    @property
    def _is_invited(self) -> bool:
        return self._context.membership is not None and self._context.membership.is_invited

    def at(self, step: int, member: Member, asked: bool) -> Iterator[Wanted]:
        """What is wanted before a step. asked: whether rank 0 had a request by the end of the last."""
        period = self._periods.at(step)
        if period == self.period:
            self.since = step
        else:
            wanted = self._scheduled(period)
            if wanted.plans:
                yield wanted
            else:  # the plan that there is, named once more
                self.period, self.since = period, step
        if asked and (request := self._request(member)) is not None:
            is_new, self._coming, self._waiting = request != self._coming, request, None
            self._ready = self._ready and not is_new
            yield Wanted(period, (request.plan,), ASKED, request=request, later=is_new)

    def next(self, step: int) -> Wanted | None:
        """What the options want next after a step, as far as that is known by now."""
        period = next((each for each in self._periods if each.step > step), None)
        wanted = None if period is None else self._scheduled(period)
        return wanted if wanted is not None and wanted.plans else None

    def _scheduled(self, period: Period) -> Wanted:
        changes = period.plan != self.period.plan
        must = (period.batch_size, period.seq_len) != (self.period.batch_size, self.period.seq_len)
        plans = [*([period.plan] if changes else []), *([*self._kept(period), period.plan] if must else [])]
        return Wanted(period, tuple(dict.fromkeys(plans)), SCHEDULED, must)

    def _kept(self, period: Period) -> list[str]:
        """The plan in force; where it is not what the options name, also with as many micro-batches as suit other
        batches."""
        others = {name: value for name, value in fields.read(self.plan).items() if name != "mb"}
        return [self.plan] if self.plan == period.plan else [self.plan, fields.write(others)]

    def answer(self, wanted: Wanted, answer: Answer) -> None:
        if wanted.request is not None:
            self._coming = None
        if self._context.rank == 0 and wanted.request is not None:
            self._inbox.answer(wanted.request, answer)

    def _request(self, member: Member) -> Request | None:
        """What rank 0 finds, on all ranks. Raises `OthersWait` on all of them where it finds newcomers."""
        said = everyone(member).texts(self._found() if self._context.rank == 0 else "")[0]
        if said == _MEET:
            raise OthersWait("new ranks are ready to take part")
        return Request(*json.loads(said)) if said else None

    def _found(self) -> str:
        """On rank 0. A plan for more ranks waits until there are so many."""
        if self._is_invited:
            return _MEET
        if self.pending is None:
            request = self._inbox.peek()
            if request is None or not self._gets_ranks(request.plan):
                self._waiting = self._inbox.take()
        if (request := self.pending) is not None:
            return json.dumps([request.name, request.plan])
        return _MEET if self._is_invited else ""

    def _gets_ranks(self, plan: str) -> bool:
        """Whether others will come, for a plan that needs them."""
        with contextlib.suppress(PlanError):  # whoever tries the plan will say what is wrong with it
            needed, membership = least_ranks(plan), self._context.membership
            return needed > self._context.world and membership is not None and membership.gets(needed)
        return False


def refusal(error: PhalanxError) -> str:
    """In one line."""
    return f"{error.message} ({error.hint})" if error.hint else error.message
