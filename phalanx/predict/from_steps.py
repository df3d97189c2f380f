"""Costs from steps that ran: what every kind of instruction took, and how long communication was on its way.

A rank reports of its own program; reports of one pipeline, which stands for all, become costs for `simulate.py`. When a
message or collective arrived is known where somebody waited for it, else only that it was there by then. Plain data.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from statistics import mean, median
from typing import NamedTuple, TypeVar

from phalanx.predict.costs import BucketCosts, Costs, Measured, kind_of
from phalanx.predict.timeline import channel_name
from phalanx.program.compile import CompiledPlan
from phalanx.program.groups import group_of
from phalanx.program.instructions import (
    COLLECTIVES,
    COMPUTE,
    LOCAL_REDISTRIBUTIONS,
    MOVES,
    RECEIVES,
    REDISTRIBUTIONS,
    SENDS,
    Instruction,
    Op,
)
from phalanx.program.values import Table

_BUCKETS = frozenset((Op.GATHER, Op.REDUCE, Op.SUM, Op.SHARE))
_NOTICEABLE_SECONDS = 5e-5  # of waiting: asking for what is there takes less
_UNUSUAL = 3.0  # times the median
_K = TypeVar("_K", bound=Hashable)


class Moment(NamedTuple):
    """When an instruction was begun, had everything it waited for, and had ended."""

    begin: float
    ready: float
    end: float


class Journey(NamedTuple):
    """Communication as one rank saw it. exact: somebody waited for it, so it arrived then and not before."""

    kind: str
    issued: float
    arrived: float
    exact: bool


@dataclass
class Report:
    """Of one rank. own, moving: as `Measured`; sent, received: messages in order, by channel."""

    own: dict[str, float] = field(default_factory=dict[str, float])
    moving: dict[str, float] = field(default_factory=dict[str, float])
    sent: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    received: dict[str, list[Journey]] = field(default_factory=dict[str, list[Journey]])

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Report:
        data = json.loads(text)
        data["received"] = {name: [Journey(*each) for each in rows] for name, rows in data["received"].items()}
        return Report(**data)


def report(
    compiled: CompiledPlan, rank: int, steps: Sequence[Sequence[Moment]],
    alike: Callable[[Instruction], Hashable], sizes: Sequence[int],
) -> Report:  # fmt: skip
    """steps: one moment per instruction of the rank's program. alike: computations and redistributions for which it is
    the same take equally long. sizes: of every bucket."""
    place = compiled.pp_index(rank)
    table = compiled.tables[place]
    found = Report(own=_own(table, steps, alike))
    journeys: list[tuple[Instruction, Journey]] = []
    for moments in steps:
        journeys += _journeys(table, moments)
        for row, moment in zip(table.rows, moments, strict=True):
            if (it := row.instruction).op in SENDS:
                found.sent.setdefault(channel_name(place, it.peer or 0, it.op), []).append(moment.end)
    for it, journey in journeys:
        if it.op in RECEIVES:
            found.received.setdefault(channel_name(it.peer or 0, place, it.op), []).append(journey)
    every = dict.fromkeys(row.instruction for row in table.rows)
    joint = [it for it in every if it.op in MOVES or _is_joint(compiled, rank, it)]
    found.moving = _moving(joint, journeys, alike, sizes)
    for it in joint:
        if it.op is Op.NORM:  # it waits within itself
            found.moving[kind_of(it)] = found.own[kind_of(it)]
            found.own[kind_of(it)] = 0.0
        elif it.op is Op.COUNT:
            found.moving[kind_of(it)] = 0.0
    return found


def costs_of(compiled: CompiledPlan, reports: Sequence[Report]) -> Costs:
    """reports: of one pipeline, first to last, on one clock."""
    moving = [dict(each.moving) for each in reports]
    for each, own in zip(reports, moving, strict=True):
        for channel, journeys in each.received.items():
            sent = next(other.sent[channel] for other in reports if channel in other.sent)
            started = [j._replace(issued=max(j.issued, s)) for j, s in zip(journeys, sent, strict=True)]
            own |= _by_kind((journey.kind, journey) for journey in started)
    for kind in {kind for own in moving for kind in own if kind.startswith((Op.TIE, Op.NORM))}:
        least = min(own[kind] for own in moving if kind in own)  # of the rank that came last
        for own in moving:
            if kind in own:
                own[kind] = least
    measured = Measured(tuple(each.own for each in reports), tuple(moving))
    return Costs((), (), (), buckets=(BucketCosts(),) * compiled.shape.num_buckets, measured=measured)


def _own(
    table: Table, steps: Sequence[Sequence[Moment]], alike: Callable[[Instruction], Hashable]
) -> dict[str, float]:  # fmt: skip
    """What lies between two instructions counts for the later one."""
    groups: defaultdict[Hashable, list[float]] = defaultdict(list)
    group_of_kind: dict[str, Hashable] = {}
    for moments in steps:
        last = moments[0].begin
        for row, moment in zip(table.rows, moments, strict=True):
            group = group_of_kind[kind_of(row.instruction)] = _group(row.instruction, alike)
            groups[group].append(max(0.0, moment.end - last - (moment.ready - moment.begin)))
            last = moment.end
    return {kind: _usual(groups[group]) for kind, group in group_of_kind.items()}


def _group(it: Instruction, alike: Callable[[Instruction], Hashable]) -> Hashable:
    is_of_block = it.op in COMPUTE | REDISTRIBUTIONS | LOCAL_REDISTRIBUTIONS | MOVES and it.stage is not None
    return (it.op, alike(it)) if is_of_block else kind_of(it)


def _journeys(table: Table, moments: Sequence[Moment]) -> list[tuple[Instruction, Journey]]:
    """Everything that was issued and waited for within a step."""
    brings: dict[int, int] = {}  # value → position
    arrived: dict[int, tuple[float, bool]] = {}
    for position, row in enumerate(table.rows):
        for source in {brings.pop(value) for value in row.waits if value in brings}:
            begin, ready, _ = moments[position]
            arrived.setdefault(source, (ready, position == source + 1 or ready - begin > _NOTICEABLE_SECONDS))
        if row.instruction.op in COLLECTIVES | RECEIVES | MOVES:
            brings.update(dict.fromkeys((*row.writes, *row.adds), position))
    found: list[tuple[Instruction, Journey]] = []
    for source, (ready, exact) in sorted(arrived.items()):
        it = table.rows[source].instruction
        found.append((it, Journey(kind_of(it), moments[source].end, ready, exact)))
    return found


def _moving(
    joint: Sequence[Instruction], journeys: Sequence[tuple[Instruction, Journey]],
    alike: Callable[[Instruction], Hashable], sizes: Sequence[int],
) -> dict[str, float]:  # fmt: skip
    """Of collectives and copies. Those of buckets are hidden behind computation, so all are taken to be as fast as the
    one that was fastest for its size; copies between device and host count where somebody waited for them."""
    known = [(it, journey) for it, journey in journeys if it.op in REDISTRIBUTIONS or it.op is Op.TIE]
    known += [(it, journey) for it, journey in journeys if it.op in MOVES and journey.exact]
    seen = _by_kind((_group(it, alike), journey) for it, journey in known)
    found = {kind_of(it): seen[_group(it, alike)] for it in joint if _group(it, alike) in seen}
    rates: defaultdict[Op, list[float]] = defaultdict(list)
    for it, journey in journeys:
        if it.op in _BUCKETS and (size := sizes[it.block or 0]):
            rates[it.op].append((journey.arrived - journey.issued) / size)
    fastest = {op: min(found) for op, found in rates.items()}
    for it in joint:
        if it.op in _BUCKETS:
            rate = fastest.get(it.op, max(fastest.values(), default=0.0))
            found[kind_of(it)] = rate * sizes[it.block or 0]
    return found


def _by_kind(journeys: Iterable[tuple[_K, Journey]]) -> dict[_K, float]:
    """Seconds on the way: as usual where it is known, else as little as it can have been."""
    exact: defaultdict[_K, list[float]] = defaultdict(list)
    bounds: defaultdict[_K, list[float]] = defaultdict(list)
    for kind, journey in journeys:
        (exact if journey.exact else bounds)[kind].append(max(0.0, journey.arrived - journey.issued))
    return {kind: min(seconds) for kind, seconds in bounds.items()} | {k: _usual(s) for k, s in exact.items()}


def _usual(seconds: Sequence[float]) -> float:
    """The mean, since steps are sums; without what happened once, such as a compilation."""
    most = _UNUSUAL * median(seconds)
    return mean(value for value in seconds if value <= most)


def _is_joint(compiled: CompiledPlan, rank: int, it: Instruction) -> bool:
    return it.op in COLLECTIVES and len(group_of(compiled.plan, compiled.shape, rank, it)) > 1
