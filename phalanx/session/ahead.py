"""A plan that is made ready while another one trains.

What computes, and holds Python's interpreter while it does (programs, tracing, compiling), is done between steps, a
piece at a time: on a thread beside a step it would take no less time, and would slow the step by more. What mostly
waits, or is short, is done on a thread: groups beside those in use, where the backend allows that, and the moves of
state. Nothing here decides or refuses: whatever is not ready when the plan changes is made then, and what cannot be is
refused then.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import torch

from phalanx.adapt.migrate import rounds_of
from phalanx.comm.links import Links
from phalanx.config import RunConfig
from phalanx.engine.compiled import Compiled
from phalanx.engine.step import micro_batches
from phalanx.engine.warm_up import run_once, zeros_like
from phalanx.launch.abort import background_thread
from phalanx.model.segment.segments import Call, Segment
from phalanx.params.layout_of import StateLayout
from phalanx.plan.plan import Plan
from phalanx.program.instructions import Op
from phalanx.session.beforehand import Connected, connect_beside
from phalanx.session.change import links_of, migration_of
from phalanx.session.session import Look
from phalanx.session.spare import Member
from phalanx.tasks.base import Batch

FirstBatch = Callable[[Compiled], tuple[Batch, int]]  # a rank's part of a batch, and its place in the stream
PIECE_SECONDS = 0.1  # that a piece of a preparation takes about, between two steps
_FUNCTIONS = {Op.F: "forward", Op.A: "again", Op.B: "backward", Op.W: "weight", Op.BW: "backward_weight"}


def functions(compiled: Compiled, first_batch: FirstBatch) -> Iterator[None]:
    """Makes the functions that steps of a plan will call, and what is known of the memory that they need. Each `next`
    does a piece of it. On a GPU each is run once, which loads its kernels; but not those of slices, which attend to
    what slices before them left."""
    runs = compiled.device.type == "cuda" and not compiled.plan.slices
    batch, first = first_batch(compiled)
    inputs = micro_batches(compiled.training.feeder, compiled.plan, batch, first)
    for (micro_batch, _), part in inputs.items():
        for slice_ in range(compiled.plan.num_slices(micro_batch)):
            segments = compiled.training.tracer(part, slice_).segments.values()
            yield
            for segment in segments:
                calls = _computed(segment, _used(compiled, segment))
                if runs:
                    run_on_zeros(segment, calls, compiled.device)
                yield


def with_functions(look: Look, first_batch: FirstBatch) -> Look:
    """The same, and the functions are made that steps will call, so that a change is refused where one cannot be."""

    def seen(compiled: Compiled, compile: Callable[[Plan], Compiled]) -> Compiled:
        chosen = look(compiled, compile)
        for _ in functions(chosen, first_batch):
            pass
        return chosen

    return seen


def _used(compiled: Compiled, segment: Segment) -> Iterator[str]:
    """The properties of a segment that running the program asks for."""
    yield "working"
    for op in ({it.op for it in compiled.program} & _FUNCTIONS.keys()) if any(segment.joint.differentiable) else ():
        if op not in (Op.W, Op.BW) or segment.trains:
            yield _FUNCTIONS[op]


def _computed(segment: Segment, properties: Iterator[str]) -> list[Call]:
    """They are computed when they are first read, and kept."""
    found = [getattr(segment, name) for name in properties]
    return [each for each in found if isinstance(each, Call)]


@torch.no_grad()
def run_on_zeros(segment: Segment, calls: Iterable[Call], device: torch.device) -> None:
    for call in calls:
        run_once(call, [zeros_like(segment.like(source), device) for source in call.arguments])


class Ahead:
    """One rank's part of the preparation. All ranks of a job begin it between the same two steps, with the same name,
    which no other preparation of this generation has."""

    def __init__(
        self, member: Member, plan: Plan, config: RunConfig, name: str, first_batch: FirstBatch,
        look: Callable[[Compiled], None] | None = None,
    ) -> None:  # fmt: skip
        """config: with the size of batches under the plan. look: what else is to be known of what is compiled."""
        assert member.opening is not None
        self.old, self.plan, self.name = member.plan, plan, name
        self._opening = replace(member.opening, config=config)
        self._links, self._first_batch, self._look = links_of(member), first_batch, look
        self._thread: threading.Thread | None = None
        self._beside: Links | None = None
        self._is_dropped = False
        self._connected: Connected | None = None
        self._work: Iterator[None] | None = self._pieces(member)

    def go_on(self, seconds: float) -> None:
        """Works for about so long, between two steps."""
        until = time.monotonic() + seconds
        while self._work is not None and time.monotonic() < until:
            try:
                next(self._work)
            except StopIteration:
                self._work = None
            except Exception:  # it will be met again when the plan changes, and told of then
                self._work = None

    @property
    def is_ready(self) -> bool:
        """Whether nothing is left to do, be it because something failed."""
        return self._work is None and (self._thread is None or not self._thread.is_alive())

    def suits(self, old: Plan, plan: Plan) -> bool:
        return (self.old, self.plan) == (old, plan)

    @property
    def has_groups(self) -> bool:
        """Waits for the groups; whether they are there. No rank may use them unless all have them."""
        if self._thread is not None:
            self._thread.join()
        return self._connected is not None

    def take_groups(self) -> Connected:
        """From now on with the links that train."""
        assert self._beside is not None and self._connected is not None
        connected = self._connected.over(self._links, self._beside)
        self._beside = self._connected = None
        return connected

    def drop(self) -> None:
        """Lets go of groups that are not used, once they are there."""
        self._work, self._is_dropped = None, True
        if self._thread is None or not self._thread.is_alive():
            self._leave()

    def _leave(self) -> None:
        if self._beside is not None:
            self._beside.leave()
        self._beside = self._connected = None

    def _pieces(self, member: Member) -> Iterator[None]:
        opening, compiled = self._opening, None
        if opening.has_place(self.plan):
            compiled = opening.remembered(self.plan)
            layout = compiled.formation.state
        else:
            layout = opening.layout(self.plan)
        self._begin(member.state.layout, compiled, layout)
        yield
        if compiled is not None:
            yield from functions(compiled, self._first_batch)
            if self._look is not None:
                self._look(compiled)

    def _begin(self, old: StateLayout, compiled: Compiled | None, new: StateLayout) -> None:
        self._thread = background_thread(lambda: self._beside_steps(old, compiled, new), "phalanx-ahead")
        self._thread.start()

    def _beside_steps(self, old: StateLayout, compiled: Compiled | None, new: StateLayout) -> None:
        opening = self._opening
        try:
            if opening.device.type == "cpu" and opening.context.world > 1:
                self._beside = self._links.beside(self.name)
                self._connected = connect_beside(opening, self.plan, compiled, self._beside)
            if old.facts.slots is not None:
                migration = migration_of(opening, old, new, old.expected_slots)
                rounds_of(migration, opening.context.rank, range(opening.context.world))
        except Exception:  # as in `go_on`
            self._leave()
        if self._is_dropped:
            self._leave()
