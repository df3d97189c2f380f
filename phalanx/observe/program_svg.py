"""Draws timelines as one SVG picture, written by hand: no plotting library, and it opens in any browser.

Several timelines (predicted, measured) are drawn below each other on one time scale. Hovering over a bar names its
instruction.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from math import floor, log10

from phalanx.observe.program_bars import COLOURS, MEANINGS, Bar, bars_of, duration_text, lanes_of
from phalanx.program.timeline import Timeline

_WIDTH, _LEFT, _RIGHT = 1280, 64, 16
_HEIGHTS = {"compute": 22, "messages": 7, "collectives": 7}
_GAP, _TITLE, _AXIS, _LEGEND = 6, 30, 24, 30
_CHARACTER = 6.5  # width of a digit in the labels


def svg(timelines: Mapping[str, Timeline]) -> str:
    """The picture; the names of the timelines are the titles."""
    scale = (_WIDTH - _LEFT - _RIGHT) / (max((t.makespan for t in timelines.values()), default=0.0) or 1.0)
    lines: list[str] = []
    y = 0.0
    for name, timeline in timelines.items():
        panel, height = _panel(name, timeline, scale, y)
        lines += panel
        y += height
    lines += _legend(y)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {y + _LEGEND:g}" '
        f'font-family="system-ui, sans-serif" font-size="11">'
    )
    return "\n".join([head, '<rect width="100%" height="100%" fill="#ffffff"/>', *lines, "</svg>\n"])


def _panel(name: str, timeline: Timeline, scale: float, top: float) -> tuple[list[str], float]:
    """One timeline: its lines of SVG, and how high it is."""
    bars = bars_of(timeline)
    lanes = lanes_of(bars)
    row = sum(_HEIGHTS[lane] for lane in lanes) + _GAP
    rows = {rank: top + _TITLE + i * row for i, rank in enumerate(timeline.ranks)}
    offsets = {lane: sum(_HEIGHTS[before] for before in lanes[:i]) for i, lane in enumerate(lanes)}
    title = f"{name}: {duration_text(timeline.makespan)}, bubble {timeline.mean_bubble:.1%}"
    lines = [f'<text x="{_LEFT}" y="{top + 19:g}" font-size="13" font-weight="600">{escape(title)}</text>']
    for rank, y in rows.items():
        lines.append(f'<text x="{_LEFT - 8}" y="{y + 15:g}" text-anchor="end">rank {rank}</text>')
        width = max(timeline.makespan * scale, 1)
        lines.append(f'<rect x="{_LEFT}" y="{y:g}" width="{width:.2f}" height="{row - _GAP}" fill="#f2f2f2"/>')
    for bar in bars:
        lines += _draw(bar, rows[bar.rank] + offsets[bar.lane], scale)
    bottom = top + _TITLE + len(rows) * row
    lines += _axis(timeline.makespan, scale, bottom)
    return lines, bottom + _AXIS - top


def _draw(bar: Bar, y: float, scale: float) -> Iterator[str]:
    x, width = _LEFT + bar.start * scale, (bar.end - bar.start) * scale
    height = _HEIGHTS[bar.lane]
    # Later virtual stages of a rank are lighter, so that interleaving can be seen.
    opacity = max(0.4, 1 - 0.3 * bar.turn)
    yield (
        f'<rect x="{x:.2f}" y="{y:g}" width="{max(width, 0.3):.2f}" height="{height}" fill="{COLOURS[bar.op]}" '
        f'fill-opacity="{opacity:.2g}" stroke="#ffffff" stroke-width="{0.5 if width > 3 else 0}">'
        f"<title>{escape(bar.title)}  {duration_text(bar.start)} + {duration_text(bar.end - bar.start)}</title></rect>"
    )
    if bar.lane == "compute" and bar.label and width > _CHARACTER * len(bar.label) + 2:
        yield (
            f'<text x="{x + width / 2:.2f}" y="{y + 15:g}" text-anchor="middle" fill="#ffffff" '
            f'pointer-events="none">{bar.label}</text>'
        )


def _axis(makespan: float, scale: float, y: float) -> Iterator[str]:
    for tick in ticks(makespan):
        x = _LEFT + tick * scale
        yield f'<line x1="{x:.2f}" x2="{x:.2f}" y1="{y - _GAP:g}" y2="{y:g}" stroke="#888888"/>'
        yield f'<text x="{x:.2f}" y="{y + 12:g}" text-anchor="middle" fill="#666666">{duration_text(tick)}</text>'


def _legend(y: float) -> Iterator[str]:
    x = float(_LEFT)
    for meaning, op in MEANINGS.items():
        yield f'<rect x="{x:g}" y="{y + 10:g}" width="10" height="10" fill="{COLOURS[op]}"/>'
        yield f'<text x="{x + 14:g}" y="{y + 19:g}">{escape(meaning)}</text>'
        x += 30 + _CHARACTER * len(meaning)


def ticks(makespan: float, most: int = 10) -> list[float]:
    """Round times from 0 to the end, at most `most` steps apart."""
    if makespan <= 0:
        return [0.0]
    power = 10.0 ** floor(log10(makespan / most))
    step = next(size * power for size in (1, 2, 5, 10) if size * power * most >= makespan * (1 - 1e-9))
    return [i * step for i in range(int(makespan / step + 1e-9) + 1)]
