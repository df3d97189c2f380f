"""The page docs/results/schedules.md, from what `schedules.py` measured."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import report
from schedules import rows

RESULTS = Path(__file__).parent.parent / "docs" / "results"
TARGET = 0.10
INTRO = """# Schedules: simulated beside measured

The simulator is given a profile (seconds of F, B, W and BW of each block, of the norm, the update and of starting a
message) that was measured under 1F1B and ZB-H1 only, and the speed of a link from a message passed to and fro. It
then predicts a step of every schedule. Predictions are compared with steps that are not part of the profile; all
schedules run in turn in one job. `measured` is the time from the first instruction on any rank to the end of the last;
`whole step` is what a training loop sees, with the cutting of micro-batches before the program. Errors are relative to
what was measured: minus is a prediction too low. The target is 10 % on the ranks of the GPU.

Ranks that share a GPU or cores get in each other's way, more so the busier a schedule keeps them, so a block's time
depends on the schedule. `with own times` is the same simulation with the times of blocks taken from (other) rounds of
the schedule itself: what is left of the error is the simulator's own.
"""
HEADERS = [
    "ranks", "schedule", "simulated ms", "with own times ms", "measured ms (spread)", "error", "with own times",
    "simulated bubble", "measured bubble", "whole step ms",
]  # fmt: skip


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
    first = results[0]
    link = first["link"]["latency_s"] * 1e3, first["link"]["bytes_per_s"] / 1e9
    size = f" + bytes / {link[1]:.2f} GB/s" if math.isfinite(link[1]) else " whatever its size"
    return (
        f"{kind}: {inside} of {len(errors)} schedules within 10 %; the farthest is {worst} ({errors[worst]:+.1%}). "
        f"A message takes {link[0]:.2f} ms{size} and {first['issue_seconds'] * 1e3:.2f} ms to "
        f"start, the norm {first['norm_seconds'] * 1e3:.2f} ms. The machine has {first['cores']} cores; its load was "
        f"{first['load']:.1f}.\n"
    )
