"""Token slices: the published steps of TeraPipe on V100 beside what the slice planner simulates.

    python benchmarks/terapipe_published.py [CSV] [--out docs/results/terapipe_published.json]

Nothing is run: the published figures are read from a CSV, which is not part of the project (default:
../shared/data/published_runs.csv beside the checkout). Of its rows those are used whose source names TeraPipe, with the
columns source, model, layers, hidden, heads, seq_len, tp, pp, dp, global_batch, measured_iter_s and notes; notes say
the slicing: "w/o TeraPipe", "w/ TeraPipe", "token slices=N" or "token slices=DP".

Four numbers of the cluster (time per FLOP, per pair of attention, per slice and at least per layer) are calibrated on
the runs without slices and on two uniform slicings of one setting; the other rows are compared with the simulation.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict
from itertools import combinations
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import plot
import report
from terapipe_model import FINE, FORMS, GRAIN, PLANNED, Device, Run, Setting, calibrate, read

from phalanx.planning.slice_search import plan_batch, slice_seconds, step_seconds
from phalanx.profile.slice_fit import planned_by_depth

PUBLISHED = Path(__file__).parent.parent.parent / "shared" / "data" / "published_runs.csv"
SLICINGS = (1, 4, 8, 16, 32, 64, FINE)
DEPTHS = (6, 12, 24, 48, 96, 192, 384, 768)
HEADERS = [
    "model",
    "tokens",
    "pp×tp×dp",
    "samples",
    "slices",
    "simulated s",
    "published s",
    "error",
    "speed-up",
    "published",
]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = report.options(__doc__ or "")
    parser.add_argument("csv", nargs="?", type=Path, default=PUBLISHED, help="the published runs")
    chosen = parser.parse_args(arguments)
    runs = _runs(parser, chosen.csv)
    setting, results = compare(runs)
    print(report.table(HEADERS, [row for result in results for row in rows(result)]))
    report.publish(chosen, "terapipe_published", setting, results, panels(results))


def _runs(parser: argparse.ArgumentParser, path: Path) -> list[Run]:
    if not path.is_file():
        parser.error(f"there is no {path}; name a CSV of published runs (--help says which columns it needs)")
    runs = read(path)
    if not {1, FINE} <= {run.slicing for run in runs if run.calibrates}:
        parser.error(f"{path} has no TeraPipe rows without slices and with {FINE} slices to calibrate on")
    return runs


def compare(runs: Sequence[Run]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The setting of the benchmark, with every form of the model, and the results of the first form by setting."""
    devices = [calibrate(runs, form) for form in FORMS]
    by_device = [[simulate(device, setting, runs) for setting in settings(runs)] for device in devices]
    forms = [_form(device, results) for device, results in zip(devices, by_device)]
    deepest = max(settings(runs), key=lambda setting: setting.pp)
    planned = planned_by_depth(devices[0].times(deepest), DEPTHS, GRAIN)
    depths = [{"stages": depth, "lengths": slicing.lengths} for depth, slicing in planned.items()]
    return {"grain": GRAIN, "forms": forms, "depth_model": deepest.model, "depths": depths}, by_device[0]


def settings(runs: Sequence[Run]) -> list[Setting]:
    return list(dict.fromkeys(run.setting for run in runs))


def simulate(device: Device, setting: Setting, runs: Sequence[Run]) -> dict[str, Any]:
    """The step of every slicing of one setting, with what was published where there is such a row."""
    published = {run.slicing: run for run in runs if run.setting == setting}
    times = device.times(setting)
    planned = plan_batch({1: times}, setting.samples, setting.pp, GRAIN)
    seconds = {PLANNED: planned.seconds}
    for number in SLICINGS:
        grains = [setting.tokens // GRAIN // number] * number
        seconds[number] = step_seconds(slice_seconds(times, grains) * setting.samples, setting.pp)
    steps = [
        {
            "slices": number, "simulated": seconds[number] + setting.reduction,
            "published": published[number].seconds if number in published else None,
            "calibrates": number in published and published[number].calibrates,
        }
        for number in (*SLICINGS, PLANNED)
    ]  # fmt: skip
    lengths = sorted({part.lengths for part in planned.parts})
    return {**asdict(setting), "steps": steps, "planned": lengths}


def held_out(results: Sequence[dict[str, Any]]) -> list[float]:
    """Relative errors of published steps that were not calibrated on."""
    steps = [step for result in results for step in result["steps"] if step["published"] and not step["calibrates"]]
    return [step["simulated"] / step["published"] - 1 for step in steps]


def swapped(result: dict[str, Any]) -> list[tuple[int, int]]:
    """Pairs of slicings of which another one is faster in the simulation than was published."""
    known = [step for step in result["steps"] if step["published"]]
    return [
        (a["slices"], b["slices"])
        for a, b in combinations(known, 2)
        if (a["simulated"] < b["simulated"]) != (a["published"] < b["published"])
    ]


def _form(device: Device, results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    errors = [abs(error) for error in held_out(results)]
    used = [step for result in results for step in result["steps"] if step["calibrates"]]
    return {
        "name": device.form.name, "per_flop": device.per_flop, "per_pair": device.per_pair, "start": device.start,
        "floor": device.floor, "swapped": sum(len(swapped(result)) for result in results),
        "calibration_error": max(abs(step["simulated"] / step["published"] - 1) for step in used),
        "held_out": len(errors), "held_out_median": statistics.median(errors), "held_out_largest": max(errors),
    }  # fmt: skip


def speed_up(result: dict[str, Any], step: dict[str, Any], key: str) -> float | None:
    whole = next(other for other in result["steps"] if other["slices"] == 1)
    return whole[key] / step[key] if whole[key] and step[key] else None


def rows(result: dict[str, Any]) -> list[list[str]]:
    """The table's rows of one setting, fastest slicing first. A star marks what was calibrated on."""
    where = [
        result["model"],
        str(result["tokens"]),
        f"{result['pp']}×{result['tp']}×{result['dp']}",
        str(result["samples"]),
    ]
    return [[*where, *_cells(result, step)] for step in sorted(result["steps"], key=lambda step: step["simulated"])]


def _cells(result: dict[str, Any], step: dict[str, Any]) -> list[str]:
    published, theirs = step["published"], speed_up(result, step, "published")
    error = f"{step['simulated'] / published - 1:+.1%}".replace("%", " %") if published else ""
    return [
        str(step["slices"]) if step["slices"] != PLANNED else "planned", f"{step['simulated']:.3f}",
        f"{published:.3f}{' *' if step['calibrates'] else ''}" if published else "", error,
        f"{speed_up(result, step, 'simulated'):.2f}×", f"{theirs:.2f}×" if theirs else "",
    ]  # fmt: skip


def panels(results: Sequence[dict[str, Any]]) -> list[plot.Panel]:
    return [_panel(result) for result in results if sum(bool(step["published"]) for step in result["steps"]) > 2]


def _panel(result: dict[str, Any]) -> plot.Panel:
    def points(key: str) -> list[plot.Point]:
        names = [(str(s["slices"]) if s["slices"] != PLANNED else "planned", s[key]) for s in result["steps"] if s[key]]
        return [plot.Point(name, seconds, seconds, seconds) for name, seconds in names]

    title = f"{result['model']}, {result['pp']} stages, {result['samples']} × {result['tokens']} tokens"
    return plot.Panel(title, "slices", "seconds", {key: points(key) for key in ("simulated", "published")})


if __name__ == "__main__":
    main()
