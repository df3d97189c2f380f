"""What a GPU did in one step, from torch's profiler: when it computed, when it copied, and what no computation hid."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

Interval = tuple[float, float]  # seconds since the step began

KINDS = {"kernel": "compute", "gpu_memset": "compute"}
OUT, IN = "out", "in"  # copies to the host and from it


@dataclass(frozen=True)
class Done:
    """kind: compute, out or in. size: in bytes, of copies."""

    kind: str
    name: str
    begin: float
    end: float
    size: int = 0


def traced(step: Callable[[], object]) -> list[Done]:
    """Everything that the GPU did in a step, in order."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        step()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        found.export_chrome_trace(str(file))
        return read(json.loads(file.read_text())["traceEvents"])


def read(events: Iterable[dict[str, Any]]) -> list[Done]:
    """From the events of a Chrome trace, whose times are microseconds."""
    found = [done for event in events if event.get("ph") == "X" and (done := _done(event)) is not None]
    origin = min((done.begin for done in found), default=0.0)
    moved = [Done(d.kind, d.name, d.begin - origin, d.end - origin, d.size) for d in found]
    return sorted(moved, key=lambda done: done.begin)


def _done(event: dict[str, Any]) -> Done | None:
    category, name = event.get("cat", ""), event["name"]
    begin, end = event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6
    if category == "gpu_memcpy" and "DtoD" not in name:
        kind = OUT if "DtoH" in name else IN
        return Done(kind, name, begin, end, int(event.get("args", {}).get("bytes", 0)))
    if category == "gpu_memcpy" or category in KINDS:
        return Done("compute", name, begin, end)
    return None


def busy(done: Iterable[Done], *kinds: str) -> list[Interval]:
    """When something of these kinds ran: intervals that do not touch, in order."""
    found: list[Interval] = []
    for begin, end in sorted((each.begin, each.end) for each in done if each.kind in kinds):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((begin, end))
    return found


def without(intervals: Sequence[Interval], others: Sequence[Interval]) -> list[Interval]:
    """What is left of intervals outside others; each in order, without overlaps among themselves."""
    left: list[Interval] = []
    position = 0
    for begin, end in intervals:
        while position < len(others) and others[position][1] <= begin:
            position += 1
        at = position
        while at < len(others) and others[at][0] < end:
            if others[at][0] > begin:
                left.append((begin, others[at][0]))
            begin = max(begin, others[at][1])
            at += 1
        if begin < end:
            left.append((begin, end))
    return left


def length(intervals: Iterable[Interval]) -> float:
    return sum(end - begin for begin, end in intervals)


def gaps(done: Sequence[Done], longer: float) -> list[tuple[float, float, str]]:
    """Where nothing is computed for longer than so many seconds: since when, how long, and what comes next."""
    computing = busy(done, "compute")
    names = {each.begin: each.name for each in done if each.kind == "compute"}
    pairs = pairwise(computing)
    return [(a[1], b[0] - a[1], names.get(b[0], "")) for a, b in pairs if b[0] - a[1] > longer]


def picture(done: Sequence[Done], width: int = 120) -> str:
    """One line for each kind, a character for so much of the step: how full it was of it."""
    whole = max((each.end for each in done), default=0.0)
    lines = [f"{kind:8}{_line(busy(done, kind), whole, width)}" for kind in ("compute", OUT, IN)]
    return "\n".join([*lines, f"{'':8}0{f'{whole * 1e3:.0f} ms':>{width - 1}}"])


def _line(intervals: Sequence[Interval], whole: float, width: int) -> str:
    unit = whole / width
    shares = [0.0] * width
    for begin, end in intervals:
        for cell in range(int(begin / unit), min(width, int(end / unit) + 1)):
            shares[cell] += max(0.0, min(end, (cell + 1) * unit) - max(begin, cell * unit)) / unit
    return "".join(" ▁▂▃▄▅▆▇█"[min(8, round(share * 8))] for share in shares)
