"""A timeline as bars on lanes, and those drawn as text: one line per rank, in as many strips as the width needs.

Every drawing of a timeline shares the bars, whatever it is drawn with; those that become files are in
`program_files.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import ceil
from statistics import median
from typing import TYPE_CHECKING

from phalanx.predict.timeline import COMPUTE, Event, Timeline
from phalanx.program.instructions import COMPUTE as COMPUTES
from phalanx.program.instructions import HALVES, MOVES, RECEIVES, SENDS, Op

if TYPE_CHECKING:
    from rich.text import Text

LANES = ("compute", "messages", "collectives", "copies")
# Paul Tol's "bright" scheme: distinct for colour-blind readers too.
COLOURS = {
    Op.F: "#4477aa", Op.B: "#ee6677", Op.W: "#ccbb44", Op.BW: "#ee6677", Op.STEP: "#aa3377",
    Op.SEND_F: "#66ccee", Op.RECV_F: "#66ccee", Op.SEND_B: "#ee99aa", Op.RECV_B: "#ee99aa",
    Op.GATHER: "#228833", Op.SHARE: "#228833", Op.REDUCE: "#99bb55", Op.SUM: "#99bb55", Op.TIE: "#99bb55",
    Op.INPUT: "#bbbbbb", Op.LF: "#117799", Op.LA: "#117799", Op.LB: "#994455",
    Op.COUNT: "#bbbbbb", Op.NORM: "#bbbbbb", Op.A: "#88aacc", Op.CF: "#117799", Op.CA: "#117799", Op.CB: "#994455",
    Op.OUT: "#cc8844", Op.IN: "#eebb77",
}  # fmt: skip
MEANINGS = {
    "forward": Op.F, "backward": Op.B, "weight gradients": Op.W, "optimizer": Op.STEP, "message": Op.SEND_F,
    "message back": Op.SEND_B, "gather": Op.GATHER, "reduce": Op.REDUCE, "count, norm": Op.NORM,
    "forward again": Op.A, "redistribution": Op.CF, "redistribution back": Op.CB,
    "to host": Op.OUT, "from host": Op.IN,
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
        text = str(instruction._replace(block=None, op_index=None)) if instruction.op in COMPUTES else str(instruction)
        label = "" if instruction.micro_batch is None else str(instruction.micro_batch)
        label += "" if instruction.slice is None else f".{instruction.slice}"
        label += "" if instruction.half is None else HALVES[instruction.half]
        start, end = event.start - timeline.begin, event.end - timeline.begin
        turn = turns.get((event.rank, instruction.stage), 0)
        yield Bar(event.rank, _lane(event), instruction.op, start, end, label, text, turn)


def _lane(event: Event) -> str:
    if event.resource == COMPUTE:
        return "compute"
    if event.instruction.op in MOVES or event.instruction.op is Op.STEP:
        return "copies"
    return "messages" if event.instruction.op in SENDS | RECEIVES else "collectives"


def _merged(bars: Iterable[Bar], gap: float) -> Iterator[Bar]:
    """Consecutive computations of one rank that differ in their block or op only, as one."""
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


MOST_STRIPS = 8
_IDLE = "·"
_LETTERS = {Op.F: "F", Op.B: "B", Op.W: "W", Op.BW: "B", Op.A: "A", Op.STEP: "S"}
_OTHER = "-"  # what takes a rank's time and has no letter: inputs, local redistributions, counts of one rank

Cell = tuple[str, str]  # characters and their style


def chart(timeline: Timeline, ranks: Sequence[int], width: int) -> list[Text]:
    """The computations of some ranks over time: `F3` is a forward of micro-batch 3, `F3b` of its second half, `F3.1` of
    its slice 1 where it is cut into slices, `F5.3` that of stage 5 where a rank holds several, dots are idle time.

    Bars of ordinary length have room for their names, and what is longer than `width` goes on in the next strip; past
    MOST_STRIPS the names are cut instead.
    """
    bars = [bar for bar in bars_of(timeline) if bar.lane == "compute" and bar.rank in ranks]
    if not bars:
        return []
    margin = len(f"rank {max(ranks)} ")
    room = max(8, width - margin)
    names = _names(bars)
    scale = min(_scale(bars, names), MOST_STRIPS * room / timeline.makespan)
    length = max(1, round(timeline.makespan * scale))
    strip = ceil(length / ceil(length / room))
    rows = {rank: _row([bar for bar in bars if bar.rank == rank], names, scale, length) for rank in ranks}
    lines: list[Text] = []
    for begin in range(0, length, strip):
        lines += [_text([])] if begin else []
        for rank, cells in rows.items():
            label = (f"rank {rank} ".ljust(margin), "dim")
            lines.append(_text([label, *cells[begin : begin + strip]]))
    return [*lines, _legend(bars)]


def _names(bars: Sequence[Bar]) -> dict[Bar, str]:
    several = any(bar.turn for bar in bars)
    return {bar: _LETTERS.get(bar.op, _OTHER) + (_place(bar, several) if bar.op in COMPUTES else "") for bar in bars}


def _place(bar: Bar, several: bool) -> str:
    return bar.title.removeprefix(bar.op) if several else bar.label


def _scale(bars: Sequence[Bar], names: Mapping[Bar, str]) -> float:
    """Characters per second: the usual forward has room for its name."""
    forwards = [bar for bar in bars if bar.op == Op.F] or list(bars)
    return (max(map(len, names.values())) + 1) / median(bar.end - bar.start for bar in forwards)


def _row(bars: Sequence[Bar], names: Mapping[Bar, str], scale: float, length: int) -> list[Cell]:
    cells: list[Cell] = [(_IDLE, "dim")] * length
    for bar in bars:
        first = min(round(bar.start * scale), length - 1)
        size = min(max(1, round(bar.end * scale) - first), length - first)
        cells[first : first + size] = _cells(bar, names[bar], size)
    return cells


def _cells(bar: Bar, name: str, size: int) -> Iterator[Cell]:
    style = f"{'bold ' if bar.turn % 2 else ''}white on {COLOURS[bar.op]}"
    # Without colours a bar must still be told from the next one: its name begins it, and dashes fill it.
    return ((character, style) for character in name[:size].ljust(size, "-"))


def _legend(bars: Sequence[Bar]) -> Text:
    used = {_LETTERS.get(bar.op, _OTHER) for bar in bars}
    meanings = [f"{_LETTERS[op]} {meaning}" for meaning, op in MEANINGS.items() if _LETTERS.get(op) in used]
    return _text([(", ".join([*meanings, f"{_IDLE} idle"]), "dim")])


def _text(cells: Sequence[Cell]) -> Text:
    from rich.text import Text

    text = Text(no_wrap=True)
    for style, run in groupby(cells, key=lambda cell: cell[1]):
        text.append("".join(characters for characters, _ in run), style)
    return text
