"""A timeline as bars on lanes: what every drawing of it shares, whatever it is drawn with."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from phalanx.program.instructions import COMPUTE as COMPUTES
from phalanx.program.instructions import HALVES, RECEIVES, SENDS, Op
from phalanx.program.timeline import COMPUTE, Event, Timeline

LANES = ("compute", "messages", "collectives")
# Paul Tol's "bright" scheme: distinct for colour-blind readers too.
COLOURS = {
    Op.F: "#4477aa", Op.B: "#ee6677", Op.W: "#ccbb44", Op.BW: "#ee6677", Op.STEP: "#aa3377",
    Op.SEND_F: "#66ccee", Op.RECV_F: "#66ccee", Op.SEND_B: "#ee99aa", Op.RECV_B: "#ee99aa",
    Op.GATHER: "#228833", Op.SHARE: "#228833", Op.REDUCE: "#99bb55", Op.SUM: "#99bb55", Op.TIE: "#99bb55",
    Op.COUNT: "#bbbbbb", Op.NORM: "#bbbbbb", Op.A: "#88aacc", Op.CF: "#117799", Op.CA: "#117799", Op.CB: "#994455",
}  # fmt: skip
MEANINGS = {
    "forward": Op.F, "backward": Op.B, "weight gradients": Op.W, "optimizer": Op.STEP, "message": Op.SEND_F,
    "message back": Op.SEND_B, "gather": Op.GATHER, "reduce": Op.REDUCE, "count, norm": Op.NORM,
    "forward again": Op.A, "exchange": Op.CF, "exchange back": Op.CB,
}  # fmt: skip

# Blocks of one stage follow each other: gaps below this share of the step are the clock's, not the schedule's.
_GAP = 0.002


@dataclass(frozen=True)
class Bar:
    """`label` is what fits on it, `title` what it is in full; `turn` counts the stages of its rank."""

    rank: int
    lane: str
    op: Op
    start: float
    end: float
    label: str
    title: str
    turn: int = 0


def bars_of(timeline: Timeline) -> list[Bar]:
    """Bars in seconds from the begin of the step; the blocks of one stage and micro-batch (slice, half) are one bar."""
    return list(_merged(_bars(timeline), _GAP * timeline.makespan))


def lanes_of(bars: Iterable[Bar]) -> tuple[str, ...]:
    """The lanes that a drawing of these bars needs; computation always has one."""
    used = {bar.lane for bar in bars} | {"compute"}
    return tuple(lane for lane in LANES if lane in used)


def _turns(timeline: Timeline) -> dict[tuple[int, int | None], int]:
    stages: dict[int, set[int]] = {}
    for event in timeline.events:
        if event.instruction.stage is not None and event.instruction.op in COMPUTES:
            stages.setdefault(event.rank, set()).add(event.instruction.stage)
    return {(rank, stage): turn for rank, own in stages.items() for turn, stage in enumerate(sorted(own))}


def _bars(timeline: Timeline) -> Iterator[Bar]:
    turns = _turns(timeline)
    for event in timeline.events:
        instruction = event.instruction
        if event.seconds <= 0:
            continue
        text = str(replace(instruction, block=None, step=None)) if instruction.op in COMPUTES else str(instruction)
        label = "" if instruction.micro_batch is None else str(instruction.micro_batch)
        label += "" if instruction.slice is None else f".{instruction.slice}"
        label += "" if instruction.half is None else HALVES[instruction.half]
        start, end = event.start - timeline.begin, event.end - timeline.begin
        turn = turns.get((event.rank, instruction.stage), 0)
        yield Bar(event.rank, _lane(event), instruction.op, start, end, label, text, turn)


def _lane(event: Event) -> str:
    if event.resource == COMPUTE:
        return "compute"
    return "messages" if event.instruction.op in SENDS | RECEIVES else "collectives"


def _merged(bars: Iterable[Bar], gap: float) -> Iterator[Bar]:
    """Consecutive computations of one rank that differ in their block or step only, as one."""
    last: dict[int, Bar] = {}
    for bar in bars:
        if bar.lane != "compute":
            yield bar
            continue
        before = last.get(bar.rank)
        if before and before.title == bar.title and bar.start - before.end <= gap:
            last[bar.rank] = replace(before, end=bar.end)
            continue
        if before:
            yield before
        last[bar.rank] = bar
    yield from last.values()


def duration_text(seconds: float) -> str:
    """With as many digits as one step needs: 1.25 s, 31.2 ms, 480 µs."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.4g} {unit}"
    return f"{seconds / 1e-6:.2g} µs"
