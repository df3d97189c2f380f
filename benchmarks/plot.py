"""Draws a benchmark's figures: panels of points with their spread, against numbers or against names.

Needs matplotlib; without it nothing is drawn, because a benchmark's table and JSON hold the same.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SUFFIXES = (".png", ".svg")


@dataclass(frozen=True)
class Point:
    """x: a number, or a name."""

    x: float | str
    median: float
    low: float
    high: float

    @classmethod
    def of(cls, x: float | str, summary: Mapping[str, float]) -> Point:
        return cls(x, summary["median"], summary["low"], summary["high"])


@dataclass(frozen=True)
class Panel:
    """level: where a line is drawn across, such as 1 for ratios."""

    title: str
    x_label: str
    y_label: str
    series: Mapping[str, Sequence[Point]]
    level: float | None = None


def file(text: str) -> Path:
    """The value of --plot."""
    path = Path(text)
    if path.suffix not in SUFFIXES:
        raise argparse.ArgumentTypeError(f"{text!r} does not end in {' or '.join(SUFFIXES)}")
    return path


def draw(path: Path, panels: Sequence[Panel]) -> bool:
    """False where there is no matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(9, 4 * len(panels)), layout="constrained")
    for panel, axis in zip(panels, figure.subplots(len(panels), 1, squeeze=False)[:, 0], strict=True):
        _draw(axis, panel)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    return True


def _draw(axis: Any, panel: Panel) -> None:
    places = list(dict.fromkeys(point.x for points in panel.series.values() for point in points))
    named = any(isinstance(place, str) for place in places)
    for name, points in panel.series.items():
        spread = [[p.median - p.low for p in points], [p.high - p.median for p in points]]
        where = [p.x for p in points]
        axis.errorbar(where, [p.median for p in points], spread, fmt="o" if named else "o-", capsize=3, label=name)
    if panel.level is not None:
        axis.axhline(panel.level, color="grey", linewidth=0.8)
    if named:
        axis.tick_params("x", rotation=30)
    else:
        axis.set_xscale("log", base=2)
        axis.set_xticks(places, [f"{place:g}" for place in places])
    axis.set_title(panel.title, loc="left", fontsize=10)
    axis.set_xlabel(panel.x_label)
    axis.set_ylabel(panel.y_label)
    axis.set_ylim(bottom=0)
    axis.legend(fontsize=7, frameon=False)
