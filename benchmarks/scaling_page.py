"""What is shown of `scaling.py`'s results: its tables, its plot and the page docs/results/scaling.md."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import plot
import report

RESULTS = Path(__file__).parent.parent / "docs" / "results"
Result = Mapping[str, Any]
Table = tuple[list[str], list[list[str]]]

START_UP = ("import", "data and plan", "capture", "check", "weights", "first step")
GROWING = ("capture", "weights", "first step", "later step")
INTRO = """# Scaling

How start-up grows with a model's depth, and a step with ranks and sequence length. Figures are medians; the JSON holds
lowest and highest, too.
"""
WORDS = {
    "start-up": """## Start-up against depth

Each row is an ordinary training run in fresh processes with one thread each, of a Llama of width 64: wall seconds, in
brackets those for which the processor worked. `cold` begins with an empty cache, as the first run on a machine does;
`cached` is the next run of the same model. `check` is the comparison of a tiny model of the same architecture with the
unpatched one, which is remembered. `later step` is the median of the steps after the first, not part of the total.""",
    "ranks": """## Steps against ranks

The same global batch on more ranks, in micro-batches of the same size. Speed-up and efficiency are relative to the
rank that is alone. **Timed** rows wait where they would compute (2 ms forward and 4 ms backward of a layer and
micro-batch): their ranks are more than the machine has cores, but messages, gradients' reduction and updates are real
and share the cores. A pipeline's efficiency is bounded by its fill and drain: mb / (mb + pp - 1), shown as `bound`.""",
    "tokens": """## Steps against sequence length

One rank, always the same number of tokens per step, cut into shorter or longer samples: what grows is attention.""",
}


def tables(results: Sequence[Result]) -> dict[str, Table]:
    """By the kind of result; as printed and as on the page."""
    of = {kind: [result for result in results if result["kind"] == kind] for kind in WORDS}
    return {
        "start-up": (["layers", "cache", *START_UP, "total", "later step"], [_start_row(r) for r in of["start-up"]]),
        "ranks": (
            ["ranks", "pp", "dp", "mb", "computing", "ms per step", "speed-up", "efficiency", "bound"],
            [_ranks_row(result, _alone(of["ranks"], result)) for result in of["ranks"]],
        ),
        "tokens": (["samples", "tokens", "ms per step", "tokens/s"], [_tokens_row(r) for r in of["tokens"]]),
    }  # fmt: skip


def _start_row(result: Result) -> list[str]:
    parts = result["parts"]
    cells = [(_seconds(parts[name], "seconds"), _seconds(parts[name], "processor_seconds")) for name in START_UP]
    cells.append((sum(wall for wall, _ in cells), sum(worked for _, worked in cells)))
    later = (_seconds(parts["later step"], "seconds"), _seconds(parts["later step"], "processor_seconds"))
    return [str(result["layers"]), result["cache"], *(f"{a:.2f} ({b:.2f})" for a, b in [*cells, later])]


def _seconds(part: Result, clock: str) -> float:
    return part[clock]["median"]


def _alone(results: Sequence[Result], result: Result) -> float:
    """Seconds of the one rank that does the same as these."""
    found = [r for r in results if r["ranks"] == 1 and r["timed"] == result["timed"]]
    return found[0]["seconds"]["median"]


def _ranks_row(result: Result, alone: float) -> list[str]:
    speed_up = alone / result["seconds"]["median"]
    bound = f"{result['mb'] / (result['mb'] + result['pp'] - 1):.0%}" if result["pp"] > 1 else ""
    return [
        *(str(result[name]) for name in ("ranks", "pp", "dp", "mb")), "timed" if result["timed"] else "real",
        _milliseconds(result["seconds"]), f"{speed_up:.2f}×", f"{speed_up / result['ranks']:.0%}", bound,
    ]  # fmt: skip


def _tokens_row(result: Result) -> list[str]:
    rate = result["samples"] * result["tokens"] / result["seconds"]["median"]
    return [str(result["samples"]), str(result["tokens"]), _milliseconds(result["seconds"]), f"{rate:,.0f}"]


def _milliseconds(summary: Mapping[str, float]) -> str:
    return f"{summary['median'] * 1e3:.0f} ({summary['low'] * 1e3:.0f}–{summary['high'] * 1e3:.0f})"


def panels(results: Sequence[Result]) -> list[plot.Panel]:
    start: dict[str, list[plot.Point]] = {}
    ranks: dict[str, list[plot.Point]] = {}
    tokens = [plot.Point.of(r["tokens"], r["seconds"]) for r in results if r["kind"] == "tokens"]
    for result in results:
        if result["kind"] == "start-up":
            for part in ("capture", "weights", "first step"):
                point = plot.Point.of(result["layers"], result["parts"][part]["seconds"])
                start.setdefault(f"{part}, {result['cache']}", []).append(point)
        elif result["kind"] == "ranks" and result["timed"]:
            for way in ("pp", "dp"):
                if result[way] == result["ranks"]:
                    ranks.setdefault(f"{way}, timed", []).append(plot.Point.of(result["ranks"], result["seconds"]))
    return [
        plot.Panel("Start-up against depth", "layers", "seconds", start),
        plot.Panel("Steps against ranks", "ranks", "seconds of a step", ranks),
        plot.Panel("Steps against sequence length", "tokens per sample", "seconds of a step", {"one rank": tokens}),
    ]


def page(folder: Path = RESULTS) -> str:
    data = json.loads((folder / "scaling.json").read_text())
    machine = data["machine"]
    command = f"python benchmarks/scaling.py{' --quick' if data['setting']['quick'] else ''}"
    where = (
        f"`{command}` on {machine['cores']} cores ({machine['processor']}), torch {machine['torch']}, "
        f"{machine['date']}. Data: [scaling.json](scaling.json). {report.busy(machine)}\n"
    )
    after = {"start-up": _growth(data["results"]), "ranks": _sizes(data["setting"]), "tokens": ""}
    sections = [
        f"{WORDS[kind]}\n\n{report.markdown(*table)}\n\n{after[kind]}\n".rstrip() + "\n"
        for kind, table in tables(data["results"]).items()
    ]
    return "\n".join([INTRO, where, *sections])


def _sizes(setting: Result) -> str:
    """The models of the rows above."""
    found = {"real": setting["computed"], "timed": setting["timed"]}
    texts = [
        f"{name}: {size['layers']} layers of width {size['width']}, {size['samples']} × {size['tokens']} tokens a step"
        for name, size in found.items()
    ]
    return f"Llama shapes; {'; '.join(texts)}."


def _growth(results: Sequence[Result]) -> str:
    """What the first table says, in a sentence."""
    lines: list[str] = []
    for cache in ("cold", "cached"):
        found = [r for r in results if r["kind"] == "start-up" and r["cache"] == cache]
        low, high = min(found, key=_layers), max(found, key=_layers)
        growth = {name: _worked(high, name) / _worked(low, name) for name in GROWING}
        lines.append(
            f"From {low['layers']} to {high['layers']} layers ({high['layers'] / low['layers']:.0f}×), {cache}: "
            f"processor time of {', '.join(f'{name} {times:.1f}×' for name, times in growth.items())}."
        )
    return "\n\n".join(lines)


def _worked(result: Result, part: str) -> float:
    return _seconds(result["parts"][part], "processor_seconds")


def _layers(result: Result) -> int:
    return result["layers"]
