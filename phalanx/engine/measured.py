"""Measured timelines: when every instruction of a step really ran, in the form in which it is predicted.

On a CPU the clock is the host's, on a GPU the device's own, laid onto the host's once per step. A timeline says when a
computation ran, not how long it waited; a message or collective is shown where its rank issued it, short as that is.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from phalanx.comm.links import Group
from phalanx.engine.engine import Engine
from phalanx.launch.context import RankContext
from phalanx.observe.metrics import peak_memory
from phalanx.plan.plan import Plan
from phalanx.predict.from_steps import Moment
from phalanx.predict.timeline import COMPUTE, Event, Timeline, channel_name, copies_name, group_name
from phalanx.program.groups import group_of
from phalanx.program.instructions import COLLECTIVES, MOVES, RECEIVES, SENDS, Instruction
from phalanx.program.shape import ModelShape
from phalanx.state.rendezvous import StoreRendezvous

_CLOCK_ROUNDS = 5
_KEY = "timeline"


class Recorder:
    """A watch that notes one step of one rank; make it when the step begins."""

    def __init__(self, plan: Plan, shape: ModelShape, rank: int, device: torch.device) -> None:
        self._plan, self._shape, self._rank, self._device = plan, shape, rank, device
        self._clock: _Clock = _DeviceClock() if device.type == "cuda" else _HostClock()
        self._marks: list[tuple[Instruction, Any, Any, Any]] = []  # begin, ready, end
        self._begin: Any = None
        self._ready: Any = None

    def begin(self, instruction: Instruction) -> None:
        self._begin = self._clock.mark()

    def ready(self, instruction: Instruction) -> None:
        self._ready = self._clock.mark()

    def end(self, instruction: Instruction) -> None:
        self._marks.append((instruction, self._begin, self._ready, self._clock.mark()))

    def moments(self) -> list[Moment]:
        """Of every instruction, in order. Waits until the device has done what was recorded."""
        return [Moment(*map(self._clock.seconds, marks)) for _, *marks in self._marks]

    def timeline(self) -> Timeline:
        """This rank's part. Waits until the device has done what was recorded."""
        moments = zip((instruction for instruction, *_ in self._marks), self.moments(), strict=True)
        events = [
            Event(self._rank, instruction, moment.ready, moment.end, self._resource(instruction))
            for instruction, moment in moments
        ]
        return Timeline(tuple(events), ({},) * self._rank + ({"measured": peak_memory(self._device)},))

    def _resource(self, instruction: Instruction) -> str:
        """As the simulator names it."""
        op, peer = instruction.op, instruction.peer
        if op in COLLECTIVES:
            ranks = group_of(self._plan, self._shape, self._rank, instruction)
            return group_name(ranks) if len(ranks) > 1 else COMPUTE
        if op in SENDS or op in RECEIVES:
            assert peer is not None
            return channel_name(self._rank, peer, op) if op in SENDS else channel_name(peer, self._rank, op)
        return copies_name(self._rank, op) if op in MOVES else COMPUTE


@contextlib.contextmanager
def recording(engine: Engine) -> Iterator[Recorder]:
    """Within it the recorder sees every instruction."""
    parts = engine.parts
    recorder = Recorder(parts.plan, parts.shape, parts.rank, parts.compute.device)
    engine.watches.append(recorder)
    try:
        yield recorder
    finally:
        engine.watches.remove(recorder)


@contextlib.contextmanager
def writing(engine: Engine, context: RankContext, world: Group, path: Path, timeout: float) -> Iterator[None]:
    """Within it each rank runs one step, of which rank 0 then writes the timeline. Once in a run."""
    with recording(engine) as recorder:
        yield
    timeline = gather(recorder.timeline(), context, world, timeout)
    if timeline is not None:
        path.write_text(timeline.to_json(), encoding="utf-8")


def merge(parts: Sequence[Timeline]) -> Timeline:
    """The parts of ranks 0 … n - 1, on one clock, as one timeline that begins at zero."""
    begin = min(part.begin for part in parts if part.events)
    events = (e._replace(start=e.start - begin, end=e.end - begin) for part in parts for e in part.events)
    return Timeline(tuple(events), tuple(part.memory[rank] for rank, part in enumerate(parts)))


def gather(part: Timeline, context: RankContext, world: Group, timeout: float) -> Timeline | None:
    """All parts as one timeline, on rank 0; every rank must come here, once in a run.

    Ranks of one machine share a clock. That of another machine is compared with rank 0's when all leave a barrier,
    which they do at the same time but for the network's latency: between machines a timeline is no more exact.
    """
    if context.world == 1:
        return merge([part])
    ahead = clock_ahead(context, world)
    events = tuple(e._replace(start=e.start - ahead, end=e.end - ahead) for e in part.events)
    meeting = StoreRendezvous(context.store, context.rank)
    meeting.arrive(_KEY, Timeline(events, part.memory).to_json())
    if context.rank > 0:
        return None
    return merge([Timeline.from_json(text) for text in meeting.wait_all(_KEY, context.world, timeout)])


def clock_ahead(context: RankContext, world: Group) -> float:
    """Seconds by which this rank's clock is ahead of rank 0's; every rank must come here."""
    found: list[float] = []
    for _ in range(_CLOCK_ROUNDS):
        world.barrier().wait("clocks")
        device = torch.device(context.device)
        own = torch.tensor([time.perf_counter()], dtype=torch.float64, device=device)
        of_rank_0 = own.clone()
        world.broadcast(of_rank_0, root=0).wait("clocks")
        found.append(float(own - of_rank_0))
    return statistics.median(found) if context.node > 0 else 0.0


class _Clock(Protocol):
    """Marks are cheap to make; what time they stand for is known after the step."""

    def mark(self) -> Any: ...

    def seconds(self, mark: Any) -> float: ...


class _HostClock:
    """One clock for all processes of a machine."""

    def mark(self) -> float:
        return time.perf_counter()

    def seconds(self, mark: float) -> float:
        return mark


class _DeviceClock:
    """Marks are events on the current stream: they pass when the device gets there."""

    def __init__(self) -> None:
        _until_passed(self.mark())
        self._anchor = self.mark()
        while not self._anchor.query():  # the stream is empty, so this takes microseconds
            pass
        self._anchored = time.perf_counter()

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, mark: torch.cuda.Event) -> float:
        _until_passed(mark)
        return self._anchored + self._anchor.elapsed_time(mark) / 1e3


def _until_passed(event: torch.cuda.Event) -> None:
    while not event.query():  # not synchronize(): a rank that waits for a dead one must be stoppable
        time.sleep(1e-4)
