"""Draws timelines as a PNG picture, with matplotlib (the extra `plots`), for places that show no SVG."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from phalanx.errors import ConfigError
from phalanx.observe.program_bars import COLOURS, MEANINGS, Bar, bars_of, lanes_of
from phalanx.program.timeline import Timeline

_LANE_HEIGHTS = {"compute": 0.6, "messages": 0.15, "collectives": 0.15}
_LABEL = 0.012  # of the width: what a micro-batch's number needs


def write_png(timelines: Mapping[str, Timeline], path: Path) -> None:
    """The timelines below each other, on one time scale."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            "option png needs matplotlib, which is not installed", "pip install 'phalanx[plots]', or use --svg"
        ) from error
    heights = [0.6 + 0.4 * len(timeline.ranks) for timeline in timelines.values()]
    figure = Figure(figsize=(13, sum(heights) + 0.6), layout="constrained")
    axes = figure.subplots(len(timelines), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    for (name, timeline), axis in zip(timelines.items(), axes):
        _draw(axis, name, timeline)
    axes[-1].set_xlabel("seconds")
    handles = [axes[0].barh(0, 0, color=COLOURS[op], label=meaning) for meaning, op in MEANINGS.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=7, frameon=False)
    figure.savefig(path, dpi=150)


def _draw(axis: Any, name: str, timeline: Timeline) -> None:
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
