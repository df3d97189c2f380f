"""When every instruction of a step ran, on every rank: predicted by `simulate.py`, or measured by a run.

Both have the same form, so that they are drawn, compared and stored by the same code. A timeline only knows times;
drawing it is the business of `observe/`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, NamedTuple

from phalanx.errors import PlanError
from phalanx.program.instructions import Instruction, Op, from_text
from phalanx.records import read_json

COMPUTE = "compute"  # the resource on which a rank computes; every other resource carries communication
_FORMAT = "phalanx timeline 2"


def channel_name(source: int, target: int, op: Op) -> str:
    """The resource on which messages of this kind travel from one rank to another."""
    return f"{source}→{target} {'F' if op in (Op.SEND_F, Op.RECV_F) else 'B'}"


def copies_name(rank: int, op: Op) -> str:
    """The resource on which values travel from a rank's device to its host (OUT) or back (IN), or the host itself."""
    return {Op.OUT: f"{rank}→host", Op.IN: f"host→{rank}"}.get(op, f"host of {rank}")


@cache
def group_name(ranks: tuple[int, ...]) -> str:
    """The resource on which collectives over these ranks run."""
    return "ranks " + ",".join(map(str, ranks))


class Event(NamedTuple):
    """One instruction on one rank, in seconds. A message is an event at both ends, a collective at every member."""

    rank: int
    instruction: Instruction
    start: float
    end: float
    resource: str = COMPUTE

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True)
class Timeline:
    """One step. `events` are in the order of the ranks, and of each rank's program.

    memory: for each rank the bytes held at its peak by what holds them ("parameters", "activations", …); a measured
    run, which knows only the sum, has one entry. Empty: not known.
    """

    events: tuple[Event, ...]
    memory: tuple[Mapping[str, int], ...] = ()

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted({event.rank for event in self.events}))

    @cached_property
    def begin(self) -> float:
        return min((event.start for event in self.events), default=0.0)

    @cached_property
    def end(self) -> float:
        return max((event.end for event in self.events), default=0.0)

    @property
    def makespan(self) -> float:
        """From the first event of any rank to the end of the last, communication and optimizer included."""
        return self.end - self.begin

    def busy(self, rank: int) -> float:
        """Seconds in which the rank computes: forward, backward and optimizer."""
        return self._busy.get(rank, 0.0)

    @cached_property
    def _busy(self) -> dict[int, float]:
        busy: dict[int, float] = {}
        for event in self.events:
            if event.resource == COMPUTE:
                busy[event.rank] = busy.get(event.rank, 0.0) + event.seconds
        return busy

    def bubble(self, rank: int) -> float:
        """The share of the makespan in which the rank does not compute: 1 - busy / makespan.

        It counts idle time before the rank's first and after its last instruction too. With equal stages on p ranks,
        m micro-batches, free communication and a free optimizer it is (p - 1) / (m + p - 1) for GPipe and 1F1B,
        (p - 1) / (v m + p - 1) for v virtual stages when p divides m, and for ZB-H1 with enough micro-batches the
        share of (p - 1) (F + B - W) idle seconds.
        """
        return 1 - self.busy(rank) / self.makespan if self.makespan else 0.0

    @property
    def mean_bubble(self) -> float:
        """The share of all ranks' time in which nothing is computed."""
        return sum(map(self.bubble, self.ranks)) / len(self.ranks) if self.ranks else 0.0

    def peak_memory(self, rank: int) -> int | None:
        """Bytes at the rank's peak; None when the timeline does not know."""
        return sum(self.memory[rank].values()) if self.memory else None

    def to_json(self) -> str:
        """One line per event, so that two of them can be compared with ordinary tools."""
        rows = [json.dumps(_write_event(event)) for event in self.events]
        memory = json.dumps([dict(held) for held in self.memory])
        return f'{{"format": "{_FORMAT}", "memory": {memory}, "events": [\n' + ",\n".join(rows) + "\n]}\n"

    @staticmethod
    def from_json(text: str) -> Timeline:
        """Reads what `to_json` wrote; the error says what is not as expected."""
        try:
            data: Any = read_json(text)
            if data["format"] != _FORMAT:
                raise ValueError(f"its format is {data['format']!r}")
            events = tuple(map(_read_event, data["events"]))
            memory = tuple({str(name): int(size) for name, size in held.items()} for held in data["memory"])
            if memory and any(event.rank >= len(memory) for event in events):
                raise ValueError(f"its memory ends at rank {len(memory) - 1}")
        except (ValueError, TypeError, LookupError, AttributeError, OverflowError, PlanError) as error:
            reason = error.message if isinstance(error, PlanError) else f"{type(error).__name__}: {error}"
            raise PlanError(f"not a timeline: {reason}", f"a run writes one that begins with {_FORMAT!r}") from error
        return Timeline(events, memory)


def _write_event(event: Event) -> list[Any]:
    return [event.rank, str(event.instruction), event.resource, event.start, event.end]


def _read_event(row: list[Any]) -> Event:
    rank, text, resource, start, end = row
    (instruction,) = from_text(text)
    return Event(int(rank), instruction, float(start), float(end), str(resource))


@dataclass(frozen=True)
class Pair:
    """One quantity, predicted and measured; None: that timeline has nothing of the kind."""

    predicted: float | None
    measured: float | None

    @property
    def error(self) -> float | None:
        """By how much the prediction is off, as a share of what was measured: -0.1 is a tenth too low."""
        if self.predicted is None or not self.measured:
            return None
        return self.predicted / self.measured - 1


@dataclass(frozen=True)
class Comparison:
    """kinds: mean seconds of one instruction of each kind that either timeline has, in the order of `Op`."""

    kinds: dict[Op, Pair]
    makespan: Pair
    bubble: Pair


def compare(predicted: Timeline, measured: Timeline) -> Comparison:
    means = _means(predicted), _means(measured)
    kinds = {op: Pair(means[0].get(op), means[1].get(op)) for op in Op if op in means[0] or op in means[1]}
    return Comparison(
        kinds,
        Pair(predicted.makespan, measured.makespan),
        Pair(predicted.mean_bubble, measured.mean_bubble),
    )


def _means(timeline: Timeline) -> dict[Op, float]:
    seconds: dict[Op, list[float]] = {}
    for event in timeline.events:
        seconds.setdefault(event.instruction.op, []).append(event.seconds)
    return {op: sum(durations) / len(durations) for op, durations in seconds.items()}
