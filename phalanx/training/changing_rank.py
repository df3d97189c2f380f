"""A rank that changes its plan between two steps: its options name one, somebody asks for one, or ranks come.

What is wanted when is `changing`'s to say, how state moves is `change`'s. Here what is known to come is made ready for,
in pieces after steps, and the first plan that is not refused is changed to, with what is said of it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

from phalanx.adapt.migrate import ChangeRefused
from phalanx.errors import PhalanxError, PlanError
from phalanx.observe.requests import Answer
from phalanx.plan.plan import Plan
from phalanx.plan.shrink import shrunk
from phalanx.prepare.deterministic import changes_bits
from phalanx.session.ahead import PIECE_SECONDS
from phalanx.state.folders import replace_text
from phalanx.training.changing import Wanted, refusal
from phalanx.training.reporting import Reporter
from phalanx.training.surviving import SurvivingRank

_SOON = 100  # steps before a change that the options name in which it is made ready for
_WORTH_WAITING = 8  # steps that must be left for a change that is asked for to be made ready for


class ChangingRank(SurvivingRank):
    @property
    def is_rank0(self) -> bool:
        return self.context.rank == 0

    def change_plan(self, step: int, reporter: Reporter) -> bool:
        """Before a step: whatever its options or somebody else want changed. Whether something was."""
        changed = False
        for wanted in self.changes.at(step, self.session, reporter.changes):
            if wanted.later and self._comes_later(wanted, step):
                continue
            reporter.flush()
            with reporter.paused(), self.context.slot.within("compile"):
                record = self._try(wanted, step)
            reporter.changed(record)
            changed = changed or "refused" not in record
        reporter.changes = False
        return changed

    def _comes_later(self, wanted: Wanted, step: int) -> bool:
        """Begins to make ready for a plan that was asked for, where that pays; what cannot be is refused at once."""
        if self.run.total_steps - step < _WORTH_WAITING:
            return False
        with contextlib.suppress(PlanError):
            self.make_ready_for(wanted.period, wanted.plans[0], f"{wanted.name}@{step}")
            return True
        return False

    def make_ready(self, step: int, reporter: Reporter) -> None:
        """After a step: a piece of what is known to be wanted soon."""
        wanted = self.changes.next(step)
        if self.coming is None and wanted is not None and step + 1 < wanted.period.step <= step + _SOON:
            with contextlib.suppress(PlanError):  # it will be refused then
                self.make_ready_for(wanted.period, wanted.plans[0], f"{wanted.name}@{step}")
        if self.coming is not None:
            with reporter.paused(), self.context.slot.within("compile"):
                self.coming.ahead.go_on(PIECE_SECONDS)
        if self.coming is None or self.coming.ahead.is_ready:
            self.changes.tell_ready()

    def _try(self, wanted: Wanted, step: int) -> dict[str, Any]:
        """Changes to the first of the plans that is not refused; what is said of it."""
        began = time.perf_counter()
        record: dict[str, Any] = {"step": step, "old": self.session.plan.shown, "how": wanted.how}
        refused: PhalanxError = ChangeRefused("no plan was named")
        for text in self._tried(wanted):
            try:
                return record | self._changed(wanted, text, step, began)
            except (ChangeRefused, PlanError) as error:
                refused = error
        if wanted.must:
            raise refused
        self.changes.period, self.changes.since = wanted.period, step
        self.changes.answer(wanted, Answer(wanted.plans[0], refused=refused.message, hint=refused.hint))
        if isinstance(refused, ChangeRefused) and refused.traceback:
            record["traceback"] = refused.traceback
        return record | {"plan": wanted.plans[0], "refused": refusal(refused)}

    def _tried(self, wanted: Wanted) -> Iterator[str]:
        """What is wanted; while ranks are missing, of what the options want also what is tried after a loss."""
        yield from wanted.plans
        whole = self._of_all(wanted)
        if whole is not None:
            yield from self.standby.usual(whole, self.context.world).plans

    def _changed(self, wanted: Wanted, text: str, step: int, began: float) -> dict[str, Any]:
        old, before = self.session.plan, self.changes.period
        done = self.change(wanted.period, text)
        record = {"plan": done.new.shown, "bytes": done.bytes, "parts": done.seconds, "ready": done.ready}
        if text not in wanted.plans:
            record["how"] = f"{wanted.how}, for the ranks that there are"
        for name in ("batch_size", "seq_len"):
            if getattr(wanted.period, name) != getattr(before, name):
                record[name] = getattr(wanted.period, name)
        if self.config.deterministic and (fields := changes_bits(old, done.new)):
            record["bits"] = list(fields)
        record["seconds"] = time.perf_counter() - began
        self.changes.whole = (self._of_all(wanted) or done.new).full_text
        self.changes.plan, self.changes.since = text, step
        self.changes.answer(wanted, Answer(done.new.shown, step, seconds=record["seconds"], bytes=done.bytes))
        if self.is_rank0:
            replace_text(self.folder.path / "plan.json", done.new.to_json() + "\n")
        return record

    def _of_all(self, wanted: Wanted) -> Plan | None:
        """While ranks are missing, what all would have from a change on that the options name: what these say, or the
        plan that all had, for the batches of another period."""
        whole = self.whole_plan
        if wanted.request is not None or whole.world <= self.context.world:
            return None
        named = [wanted.period.plan] if wanted.plans[0] == wanted.period.plan else []
        for text in [*named, *shrunk(whole, (whole.pp, whole.dp, whole.tp))]:
            with contextlib.suppress(PlanError):
                return self.completed(wanted.period, text, whole.world)
        return None
