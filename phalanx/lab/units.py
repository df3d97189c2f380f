"""Rates, shares and moments as people write them in a lab's description or time line, and back.

Pure; what they are good for is known elsewhere (`spec.py`, `script.py`).
"""

from __future__ import annotations

import re

from phalanx.errors import ConfigError, nearest

# Bits per second. Links are sold in decimal units.
RATE_UNITS = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9, "kB/s": 8 * 10**3, "MB/s": 8 * 10**6, "GB/s": 8 * 10**9}
SLOWEST, FASTEST = 10**4, 10**11
_SECONDS = {"ms": 0.001, "s": 1.0, "min": 60.0}


def read_rate(place: str, text: str) -> int:
    """'1gbit' or '12.5MB/s' → bits per second. `place` names the value in the error: 'link'."""
    units = {unit.lower(): factor for unit, factor in RATE_UNITS.items()}
    number, unit = _split(text)
    if number is None or unit.lower() not in units:
        hint = nearest(unit, RATE_UNITS) if number is not None and unit else f"units: {', '.join(RATE_UNITS)}"
        raise ConfigError(f"{place}={text} is not a rate", f"write for example 1gbit or 100MB/s; {hint}")
    rate = round(number * units[unit.lower()])
    if not SLOWEST <= rate <= FASTEST:
        allowed = f"{rate_text(SLOWEST)} … {rate_text(FASTEST)}"
        raise ConfigError(f"{place}={text} is outside of what can be throttled", f"allowed: {allowed}")
    return rate


def rate_text(rate: int) -> str:
    """The shortest text that `read_rate` reads back."""
    texts = [f"{rate / RATE_UNITS[unit]:.12g}{unit}" for unit in ("gbit", "mbit", "kbit")]
    return min(texts, key=lambda text: (text.startswith("0"), len(text)))


def read_percent(place: str, text: str, lowest: int, highest: int) -> int:
    """'25%' → 25."""
    found = re.fullmatch(r"(\d{1,3})%", text, re.ASCII)
    if found is None or not lowest <= int(found[1]) <= highest:
        raise ConfigError(f"{place}={text} is not a share", f"write a whole percentage, {lowest}% … {highest}%")
    return int(found[1])


def read_seconds(text: str) -> float:
    """'5s', '1.5min' or '200ms' → seconds."""
    number, unit = _split(text)
    if number is None or unit not in _SECONDS:
        raise ConfigError(f"{text!r} is not a moment", "write the time since the start, for example 5s, 500ms or 2min")
    return number * _SECONDS[unit]


def _split(text: str) -> tuple[float | None, str]:
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([A-Za-z/]*)", text.strip(), re.ASCII)
    return (float(found[1]), found[2]) if found else (None, "")
