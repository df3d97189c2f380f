"""The page docs/results/own_runs.md, from what `own_runs.py` measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import report
from own_runs import HEADERS, choice, rows, summary

RESULTS = Path(__file__).parent.parent / "docs" / "results"
FILES = (
    "own_runs_gpu.json", "own_runs.json", "own_runs_x86.json", "own_runs_link.json", "own_runs_link_x86.json",
)  # fmt: skip
INTRO = """# Our own runs: predicted beside measured

Steps of many plans on four ranks, each predicted by simulating its program with what was measured apart from it: the
seconds of the model's segments by tensor-parallel degree and size of micro-batch, of transfers by size, how fast ranks
compute and communicate beside each other and while they wait for messages, what ranks lose that come to a sum from a
computation, and, from steps of one rank that does everything, what micro-batches and steps take besides. Nothing of a
plan's own steps enters its prediction. Profile and plans run in turn, pass by pass, in one job; `measured` is the
median over passes of what a training loop sees of a step, `spread` half of the middle half. Errors are relative to what
was measured: minus is a prediction too low.

*By planning* is what `phalanx train` says of the same plan when it has to choose one: from a few rates that it measures
in seconds, of all plans that there are, without their programs. It is there to tell plans apart, not to say what a step
takes; the plan that it chooses is among those that are measured, in a row of its own.
"""


def page(folder: Path = RESULTS) -> str:
    """The whole page, from the result files that there are."""
    files = [folder / name for name in FILES]
    return "\n".join([INTRO, *(_section(json.loads(file.read_text()), file.name) for file in files if file.exists())])


def _table(results: list[dict[str, Any]]) -> str:
    """What planning says stands last, where it was asked."""
    columns = slice(1, None if "planned_seconds" in results[0] else -1)
    return report.markdown(HEADERS[columns], [row[columns] for row in rows(results)])


def _section(data: dict[str, Any], file: str) -> str:
    machine, setting = data["machine"], data["setting"]
    where, size = " and ".join(machine["gpus"]) or machine["processor"], setting["size"]
    lines = [
        f"## {setting['ranks']}", "",
        f"`python benchmarks/own_runs.py{_options(setting)} --passes {setting['passes']}` on {where} (torch "
        f"{machine['torch']}), {machine['date']}. Data: [{file}]({file}). {report.busy(machine)}", "",
        f"Llama of {size['layers']} layers, width {size['width']}, {size['samples']} samples of {size['tokens']} "
        f"tokens in {setting['dtype']}.", "",
        _table(data["results"]), "",
        f"{summary(data['results'])}.", "", *([f"{told}.", ""] if (told := choice(data["results"])) else []),
        _beside(setting["profile"]), "",
        *([data["notes"], ""] if "notes" in data else []),
    ]  # fmt: skip
    return "\n".join(lines)


def _options(setting: dict[str, Any]) -> str:
    if setting["device"] == "cuda":
        return " --gpu"
    return f" --link {setting['ranks'].rpartition(' ')[2]}" if "nodes" in setting["ranks"] else ""


def _beside(profile: dict[str, Any]) -> str:
    speeds = profile["beside"].items()
    shown = "; ".join(f"{name} {', '.join(f'{speed:.0%}' for speed in own)}" for name, own in speeds)
    text = f"Speeds beside one other, two, …, as shares of those alone: {shown}."
    if "meeting" not in profile:
        return text
    lost = ", ".join(f"{seconds * 1e3:.1f} ms of {ranks} ranks" for ranks, seconds in profile["meeting"].items())
    return f"{text} A sum takes {profile['start'] * 1e3:.1f} ms of a rank's own time to start; lost at one: {lost}."
