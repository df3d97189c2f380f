"""Draws a timeline as text, one line per rank, in as many strips as the width needs. Colours where there are any."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from math import ceil
from statistics import median
from typing import TYPE_CHECKING

from phalanx.observe.program_bars import COLOURS, MEANINGS, Bar, bars_of
from phalanx.program.instructions import COMPUTE, Op
from phalanx.program.timeline import Timeline

if TYPE_CHECKING:
    from rich.text import Text

MOST_STRIPS = 8
_IDLE = "·"
_LETTERS = {Op.F: "F", Op.B: "B", Op.W: "W", Op.BW: "B", Op.A: "A", Op.STEP: "S"}

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
    return {bar: _LETTERS[bar.op] + (_place(bar, several) if bar.op in COMPUTE else "") for bar in bars}


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
    used = {_LETTERS[bar.op] for bar in bars}
    meanings = [f"{_LETTERS[op]} {meaning}" for meaning, op in MEANINGS.items() if _LETTERS.get(op) in used]
    return _text([(", ".join([*meanings, f"{_IDLE} idle"]), "dim")])


def _text(cells: Sequence[Cell]) -> Text:
    from rich.text import Text

    text = Text(no_wrap=True)
    for style, run in groupby(cells, key=lambda cell: cell[1]):
        text.append("".join(characters for characters, _ in run), style)
    return text
