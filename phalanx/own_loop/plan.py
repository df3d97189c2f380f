"""The plan of a session in a loop of the user's own: with what it was opened, and how it comes to another one.

A schedule that leaves everything where it is changes programs alone; any other plan moves the state.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.adapt.migrate import ChangeRefused
from phalanx.config import RunConfig
from phalanx.errors import ConfigError, PlanError
from phalanx.launch.context import RankContext
from phalanx.model.attach import Ends
from phalanx.model.captured import Captured
from phalanx.model.zoo.zoo import ModelSpec, build
from phalanx.own_loop.batch import BatchForm
from phalanx.plan.plan import Plan
from phalanx.prepare.budget import MemoryGuard
from phalanx.session.ahead import PIECE_SECONDS, Ahead, with_functions
from phalanx.session.change import Change, change
from phalanx.session.outputs import Scope
from phalanx.session.session import Session
from phalanx.tasks.base import Batch, Task
from phalanx.written import is_searched


@dataclass(frozen=True)
class Opened:
    """What a session was opened with. leave: what ends this rank's part among others, given the error if there is
    one. has_optimizer: whether the session was given one of its own. plan_of: another plan for it, of a text. loss:
    the function that was read together with the model, if there is one."""

    spec: ModelSpec
    config: RunConfig
    captured: Captured
    task: Task
    form: BatchForm
    context: RankContext
    memory: MemoryGuard
    has_optimizer: bool
    leave: Callable[[BaseException | None], None]
    plan_of: Callable[[str], Plan]
    loss: Callable[..., Tensor] | None = None
    ends: Ends | None = None  # where outputs leave
    scope: Scope = "whole"
    merges: bool = False  # whether an export has adapters merged in
    leaving: Callable[[Session, Batch], tuple[Session, Ends]] | None = None  # its state, as a model whose outputs leave

    def module(self) -> nn.Module:
        """The model without values."""
        return build(self.spec, device="meta", dropout=self.config.dropout)


def refuse_search(plan: str) -> None:
    if is_searched(plan):
        raise ConfigError(
            f"plan = {plan!r}: a loop of your own has no search for a plan",
            "give a plan, such as the one that `phalanx plan --out plan.json` writes, or leave it out",
        )


class OwnPlan:
    """`session` is the one that runs; those of other schedules have the same state."""

    def __init__(self, session: Session, opened: Opened) -> None:
        self._opened = opened
        self._coming: Ahead | None = None
        self._num_prepared = 0
        self._take(session)

    def _take(self, session: Session) -> None:
        self.session, self._schedules = session, {session.plan.schedule: session}

    def use_schedule(self, schedule: str) -> Session:
        """One that leaves blocks where they are."""
        now, leaves = self.session.plan, self._opened.ends is not None
        plan = replace(now, schedule=schedule)
        if plan.num_stages != now.num_stages or leaves:
            why = "outputs leave this session" if leaves else "it has other stages"
            raise PlanError(
                f"schedule {schedule!r} cannot follow {now.schedule!r} in a session: {why}",
                "open another session, with a plan that has this schedule",
            )
        if plan.schedule not in self._schedules:
            self._schedules[schedule] = self.session.under(plan)
        self.session = self._schedules[schedule]
        return self.session

    def prepare(self, plan: str | Plan) -> None:
        """Begins to make ready for a plan, instead of what was prepared before. All ranks at once."""
        self.forget()
        session, new, memory = self._first, self._plan(plan), self._opened.memory
        opening = session.opening
        assert opening is not None
        self._num_prepared += 1
        look = lambda compiled: memory.foresee(compiled, opening.compile)  # noqa: E731
        self._coming = Ahead(session, new, opening.config, f"own{self._num_prepared}", memory.batch, look)

    def go_on(self) -> None:
        """A piece of what is made ready, between two batches."""
        if self._coming is not None:
            with self._opened.context.slot.within("compile"), torch.no_grad():
                self._coming.go_on(PIECE_SECONDS)

    @property
    def is_prepared(self) -> bool:
        return self._coming is not None and self._coming.is_ready

    def forget(self) -> None:
        """What was made ready for."""
        if self._coming is not None:
            self._coming.drop()
        self._coming = None

    @property
    def _first(self) -> Session:
        """The session whose state all share."""
        return next(iter(self._schedules.values()))

    def _plan(self, plan: str | Plan) -> Plan:
        if isinstance(plan, str):
            refuse_search(plan)
        return self._opened.plan_of(plan.full_text if isinstance(plan, Plan) else plan)

    @torch.no_grad()
    def change(self, plan: str | Plan) -> tuple[Session, Change]:
        """Any plan for the same ranks. Where it is refused, all is as it was."""
        opened, session, new = self._opened, self._first, self._plan(plan)
        optimizer: Any = self.session.state.optimizer.inner
        opened.memory.held = sum(tensor.nbytes for tensor in session.state.tensors())
        coming = self._coming if self._coming is not None and self._coming.suits(session.plan, new) else None
        look = with_functions(opened.memory.look, opened.memory.batch)
        try:
            with opened.context.slot.within("compile"):
                member, done = change(session, new, look=look, ahead=coming)
        except ChangeRefused:
            self._take_back(optimizer)
            raise
        finally:
            self.forget()
        assert isinstance(member, Session)
        member.state.optimizer.adopt(optimizer)  # learning-rate schedulers know this one
        self._take(member)
        return member, done

    def _take_back(self, optimizer: Any) -> None:
        """State that has begun to move before a change was refused was made anew."""
        first, now = self._first, self.session.plan
        if first.state.optimizer.inner is not optimizer:
            first.state.optimizer.adopt(optimizer)
            self._take(first)
            if first.plan != now:
                self.use_schedule(now.schedule)
