"""Timelines as files: one SVG picture written by hand, a PNG with matplotlib (the extra `plots`), or a Chrome trace.

Several timelines (predicted, measured) are drawn below each other on one time scale. In the SVG, hovering over a bar
names its instruction. In the trace (ui.perfetto.dev or chrome://tracing) every rank is a process, every resource of it
a thread, and arrows lead from a message's sender to its receiver; what torch's profiler sees inside a step is the
business of `trace.py`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from html import escape
from math import floor, log10
from pathlib import Path
from typing import Any

from phalanx.errors import ConfigError
from phalanx.observe.program_text import COLOURS, MEANINGS, Bar, bars_of, duration_text, lanes_of
from phalanx.predict.timeline import COMPUTE, Event, Timeline
from phalanx.program.instructions import HALVES, RECEIVES, SENDS, Instruction, Op

_WIDTH, _LEFT, _RIGHT = 1280, 64, 16
_HEIGHTS = {"compute": 22, "messages": 7, "collectives": 7, "copies": 7}
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


_LANE_HEIGHTS = {"compute": 0.6, "messages": 0.15, "collectives": 0.15}
_LABEL = 0.012  # of the width: what a micro-batch's number needs


def write_png(timelines: Mapping[str, Timeline], path: Path) -> None:
    """The timelines below each other, on one time scale."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            "option png needs matplotlib, which is not installed",
            f"{sys.executable} -m pip install matplotlib, or use --svg",
        ) from error
    heights = [0.6 + 0.4 * len(timeline.ranks) for timeline in timelines.values()]
    figure = Figure(figsize=(13, sum(heights) + 0.6), layout="constrained")
    axes = figure.subplots(len(timelines), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    for (name, timeline), axis in zip(timelines.items(), axes):
        _draw_png(axis, name, timeline)
    axes[-1].set_xlabel("seconds")
    handles = [axes[0].barh(0, 0, color=COLOURS[op], label=meaning) for meaning, op in MEANINGS.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=7, frameon=False)
    figure.savefig(path, dpi=150)


def _draw_png(axis: Any, name: str, timeline: Timeline) -> None:
    bars = bars_of(timeline)
    lanes = lanes_of(bars)
    rows = {rank: row for row, rank in enumerate(timeline.ranks)}
    offsets = {lane: sum(_LANE_HEIGHTS[before] for before in lanes[:i]) for i, lane in enumerate(lanes)}
    least = _LABEL * timeline.makespan
    for bar in bars:
        _draw_bar(axis, bar, rows[bar.rank] - 0.45 + offsets[bar.lane], has_room=bar.end - bar.start > least)
    axis.set_title(f"{name}: bubble {timeline.mean_bubble:.1%}", loc="left", fontsize=9)
    axis.set_yticks(list(rows.values()), [f"rank {rank}" for rank in rows])
    axis.set_ylim(len(rows) - 0.5, -0.5)


def _draw_bar(axis: Any, bar: Bar, y: float, has_room: bool) -> None:
    axis.barh(
        y, bar.end - bar.start, _LANE_HEIGHTS[bar.lane], bar.start, align="edge", color=COLOURS[bar.op],
        alpha=max(0.4, 1 - 0.3 * bar.turn), edgecolor="white", linewidth=0.4,
    )  # fmt: skip
    if bar.lane == "compute" and has_room:
        middle = (bar.start + bar.end) / 2
        axis.text(middle, y + 0.3, bar.label, ha="center", va="center", color="white", fontsize=7)


_MICROSECOND = 1e-6


def chrome_trace(timelines: Mapping[str, Timeline]) -> str:
    """The trace as JSON; the processes are named after the timelines, "predicted rank 0" and so on."""
    events: list[dict[str, Any]] = []
    first = 0  # of this timeline's process ids
    for name, timeline in timelines.items():
        events += _trace(name, timeline, first)
        first += max(timeline.ranks, default=0) + 1
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _trace(name: str, timeline: Timeline, first: int) -> Iterator[dict[str, Any]]:
    threads: dict[tuple[int, str], int] = {}
    for rank in timeline.ranks:
        yield _named("process_name", f"{name} rank {rank}", pid=first + rank)
        yield {"ph": "M", "name": "process_sort_index", "pid": first + rank, "args": {"sort_index": first + rank}}
        resources = dict.fromkeys(event.resource for event in timeline.events if event.rank == rank)
        for thread, resource in enumerate(sorted(resources, key=lambda resource: resource != COMPUTE)):
            threads[rank, resource] = thread
            yield _named("thread_name", resource, pid=first + rank, tid=thread)
    for event in timeline.events:
        at = {"pid": first + event.rank, "tid": threads[event.rank, event.resource]}
        begin = (event.start - timeline.begin) / _MICROSECOND
        yield {
            "ph": "X", "name": str(event.instruction), "cat": event.resource, **at,
            "ts": begin, "dur": event.seconds / _MICROSECOND, "args": _arguments(event.instruction),
        }  # fmt: skip
        if event.instruction.op in SENDS | RECEIVES:
            yield _arrow(f"{name} {_message(event)}", event.instruction.op in SENDS, begin, at)


def _named(kind: str, name: str, **at: int) -> dict[str, Any]:
    return {"ph": "M", "name": kind, **at, "args": {"name": name}}


def _arguments(instruction: Instruction) -> dict[str, int]:
    fields = ("stage", "micro_batch", "slice", "half", "block", "op_index", "peer")
    return {field: value for field in fields if (value := getattr(instruction, field)) is not None}


def _arrow(message: str, leaves: bool, begin: float, at: Mapping[str, int]) -> dict[str, Any]:
    end = {} if leaves else {"bp": "e"}  # "e": the arrow ends at the event around it, not at the next one
    return {"ph": "s" if leaves else "f", "id": message, "name": "message", "cat": "message", "ts": begin, **at, **end}


def _message(event: Event) -> str:
    """A name that the events at both ends of a message have in common."""
    instruction = event.instruction
    source, target = (event.rank, instruction.peer) if instruction.op in SENDS else (instruction.peer, event.rank)
    direction = "F" if instruction.op in (Op.SEND_F, Op.RECV_F) else "B"
    # A message is about the cut between two stages: the forward's has the number of the stage before it.
    cut = (instruction.stage or 0) - (instruction.op in (Op.RECV_F, Op.SEND_B))
    part = "" if instruction.slice is None else f".{instruction.slice}"
    part += "" if instruction.half is None else HALVES[instruction.half]
    return f"{direction}{cut}.{instruction.micro_batch}{part} {source}→{target}"
