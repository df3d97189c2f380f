"""The page docs/results/schedules.md, from what `schedules.py` measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import report
from schedules import HEADERS, rows

RESULTS = Path(__file__).parent.parent / "docs" / "results"
TARGET = 0.10
INTRO = """# Schedules: predicted beside measured

Steps of every schedule, predicted by simulating its program, beside what a training loop sees of them; all schedules
run in turn in one job. Where ranks compute, a prediction is made of what was measured apart from all schedules, as on
the page of [our own runs](own_runs.md): seconds of the model's segments, of transfers by size, and what ranks that
share a GPU or cores do to each other while they compute, communicate and wait. Where computation is a timed wait, it is
made of the waits, norm and update as recorded under 1F1B and ZB-H1 in other rounds, and of a message passed to and fro.
Bubbles are those from the first instruction of any rank to the end of the last. Errors are relative to what was
measured: minus is a prediction too low. The target is 10 %.
"""


def page(folder: Path = RESULTS) -> str:
    """The whole page, from the result files that there are."""
    files = [folder / name for name in ("schedules_gpu.json", "schedules.json")]
    sections = [_section(json.loads(file.read_text()), file.name) for file in files if file.exists()]
    return "\n".join([INTRO, *sections])


def _section(data: dict[str, Any], file: str) -> str:
    machine, rounds = data["machine"], data["setting"]["rounds"]
    where = " and ".join(machine["gpus"]) or machine["processor"]
    command = f"python benchmarks/schedules.py{' --gpu' if machine['gpus'] else ''} --rounds {rounds}"
    kinds = list(dict.fromkeys(result["ranks"] for result in data["results"]))
    lines = [f"## {'; '.join(kinds)}", ""]
    lines += [f"`{command}` on {where} (torch {machine['torch']}), {machine['date']}. Data: [{file}]({file}).", ""]
    lines += [_model(data["setting"][kind]) for kind in kinds]
    lines += ["", report.markdown(HEADERS, rows(data["results"])), ""]
    lines += [_sentence(kind, [r for r in data["results"] if r["ranks"] == kind]) for kind in kinds]
    return "\n".join([*lines, ""])


def _model(kind: dict[str, Any]) -> str:
    size = kind["size"]
    what = "waits of 4 ms (F), 5 (B), 4 (W) and 9 (BW) instead of computing a layer" if kind["timed"] else kind["dtype"]
    return (
        f"- {kind['name']}: Llama of {size['layers']} layers, width {size['width']}, 8 micro-batches of "
        f"{size['samples'] // 8} × {size['tokens']} tokens, {what}."
    )


def _sentence(kind: str, results: list[dict[str, Any]]) -> str:
    errors = {r["schedule"]: r["simulated_seconds"] / r["measured_seconds"]["median"] - 1 for r in results}
    worst = max(errors, key=lambda name: abs(errors[name]))
    inside = sum(abs(error) <= TARGET for error in errors.values())
    return (
        f"{kind}: {inside} of {len(errors)} schedules within 10 %; the farthest is {worst} ({errors[worst]:+.1%}). The "
        f"machine has {results[0]['cores']} cores; its load was {results[0]['load']:.1f}.\n"
    )
