"""One form for every benchmark's result: a table for people, JSON with machine and versions, and a plot.

Runs of the candidates are interleaved (A B C A B C …) so that drift of the machine hits all alike; a figure is the
median over all repeats with its spread (lowest and highest).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import plot

# Read when the benchmark starts: later it is the benchmark itself that keeps the machine busy.
LOAD = os.getloadavg()[0]


def options(description: str) -> argparse.ArgumentParser:
    """A parser with the options that every benchmark has."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", metavar="FILE", help="write the results as JSON")
    parser.add_argument("--plot", type=plot.file, metavar="FILE", help="draw them (.png or .svg; needs matplotlib)")
    return parser


def publish(
    chosen: argparse.Namespace,
    name: str,
    setting: dict[str, Any],
    results: list[dict[str, Any]],
    panels: Sequence[plot.Panel],
) -> None:
    """Writes and draws what the options ask for."""
    if chosen.out:
        write(Path(chosen.out), name, setting, results)
    if chosen.plot and not plot.draw(chosen.plot, panels):
        print(f"{chosen.plot} was not drawn: matplotlib is not installed (pip install matplotlib)", file=sys.stderr)


def machine() -> dict[str, Any]:
    """Where and when: what a reader must know to judge a figure."""
    import torch
    import transformers

    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    lab = os.environ.get("PHALANX_LAB")
    return {
        "date": time.strftime("%Y-%m-%d"), "python": platform.python_version(), "torch": torch.__version__,
        "transformers": transformers.__version__, "processor": platform.machine(), "gpus": gpus,
        "cores": os.cpu_count(), "load": LOAD, **({"lab": lab} if lab else {}),
    }  # fmt: skip


def summary(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "low": min(values), "high": max(values), "repeats": len(values)}


def table(headers: list[str], rows: list[list[str]]) -> str:
    widths = [max(len(row[i]) for row in [headers, *rows]) for i in range(len(headers))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in [headers, *rows]]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def markdown(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The same for a page."""
    return "\n".join(f"| {' | '.join(row)} |" for row in [headers, ["---"] * len(headers), *rows])


def write(path: Path, name: str, setting: dict[str, Any], results: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        json.dumps({"benchmark": name, "machine": machine(), "setting": setting, "results": results}, indent=1)
    )


def busy(machine: dict[str, Any]) -> str:
    """Other work on the machine widens every spread, so a page says how much of it there was."""
    if "load" not in machine:
        return "How busy the machine was otherwise was not recorded."
    lab = f" In a lab: {machine['lab']}." if "lab" in machine else ""
    return f"Processes ready to run on {machine['cores']} cores at the start: {machine['load']:.1f}.{lab}"


def page(intro: str, file: Path, option: str, headers: Sequence[str], row: Callable[[Any], Sequence[str]]) -> str:
    """Of a benchmark with one table and one result file. option: the one that its setting names."""
    data = json.loads(file.read_text(encoding="utf-8"))
    machine = data["machine"]
    command = f"`python benchmarks/{file.stem}.py --{option} {data['setting'][option]}`"
    where = f"{command} on {machine['processor']}, {machine['date']}. Data: [{file.name}]({file.name})."
    return "\n".join([intro, where, busy(machine), "", markdown(headers, [row(own) for own in data["results"]]), ""])
