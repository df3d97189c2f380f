"""Numbers as people read them: 12.3k, 1.5 GiB, 2:05:09. For display only; logs keep the plain numbers."""

from __future__ import annotations

import math
from typing import Any


def number_text(value: float | None, unit: str = "") -> str:
    """At most four significant digits with a thousands suffix: 12345 → 12.3k; with a unit, 1.5e9 → 1.5 GFLOP/s."""
    if value is None:
        return "-"
    gap = " " if unit else ""
    if not math.isfinite(value):
        return f"{value}{gap}{unit}"
    for suffix in ("", "k", "M", "G", "T", "P"):
        # 999.95 would be printed as 1000.0; it belongs to the next suffix.
        if abs(value) < 999.95:
            return f"{value:.1f}{gap}{suffix}{unit}" if suffix else f"{value:.4g}{gap}{unit}"
        value /= 1000
    return f"{value:.1f}{gap}E{unit}"


def bytes_text(count: float | None) -> str:
    """1610612736 → 1.5 GiB."""
    if count is None:
        return "-"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1023.95:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def seconds_text(seconds: float | None) -> str:
    """Durations: 0.35 → 350ms, 12.4 → 12.4s, 75 → 1:15, 7509 → 2:05:09."""
    if seconds is None or not math.isfinite(seconds):
        return "-"
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f}ms"
    if seconds < 59.95:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def field_texts(name: str, value: Any) -> tuple[str, str]:
    """(label, text) of a named value; the unit is taken from the end of the name: memory_bytes, step_seconds, mfu."""
    label = name.removesuffix("_bytes").removesuffix("_seconds").replace("_", " ")
    if value is None:
        return label, "-"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return label, str(value)
    if name.endswith("_bytes"):
        return label, bytes_text(value)
    if name.endswith("seconds"):
        return label, seconds_text(value)
    if name == "mfu":
        return label, f"{value:.1%}"
    if name.endswith("_per_second"):
        return label, number_text(value)
    return label, f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
