"""The page docs/results/overlap.md, from what `overlap.py` measured, and the table that it prints."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import plot
import report
from overlap_cases import BASE, CALIBRATED, PAIRED, UNSPLIT

RESULTS = Path(__file__).parent.parent / "docs" / "results"
INTRO = """# Overlap: communication behind computation

Two ranks split a Llama (`tp=2`) under each mode of `overlap` ([plans](../plans.md)); all modes run in turn in one job,
and every figure is formed within a round. `compute` is the same step with nothing sent, `communication` the same
collectives one after the other with nothing computed. `blocking` would be their sum and the `ideal` the longer of the
two. `of the ideal` is ideal / measured; `hidden` is (blocking - measured) / (blocking - ideal), the part of what could
be hidden that is. Before anything is timed the link, or each rank's share of the GPU, is set so that compute :
communication of `oases` lies between 0.8 and 1.25.

A forward has half of the communication but only a quarter of the computation of a step under `oases`, so that ranks
wait for the link in the forward and the link for ranks in the backward. With C seconds of computation and K of
communication, and the backward of a micro-batch after its forward, a step takes at least max(C/4, K/2) +
max(3C/4, K/2): 80 % of the ideal at 1 : 1, 88 % at 0.85, 87 % at 1.25.
"""
PAIRS = """With `pairs` the batch is cut into several micro-batches, and the backward of each takes turns with the
forward of the next, so that only the first and the last wait so
([decision 12](../decisions/0012-pairs-of-micro-batches.md)).
"""
PREDICTED = """`predicted` is the simulation of the mode's program. Its segments are scaled so that with nothing to
send it takes `compute`, and its link so that the collectives one after the other take `communication`. How segments
compare follows from their arithmetic, and the update (1 to 4 % of `compute`) from an assumed speed of memory; the
forward's share is measured for each case: by how much `compute` is longer under `optim_comm_checkpoint`, which
computes the forward again, than under `none`. `error` is predicted / measured - 1.

One number more is of the case: the seconds that are lost wherever both ranks wait for a sum with nothing to compute.
They are what the steps of the three modes that block (`default_checkpoint`, `optim_comm_checkpoint`, `none`) take
beyond their simulation; for each of these three, what the other two do. So nothing of a row's own measured steps
enters its prediction. That this is the number to take was decided with these rows in view, after others that did
worse (slower computation beneath communication, slower communication beneath computation, time to start a
collective): on rows to come errors may be larger. Modes that cut micro-batches into halves hardly have places where
both ranks wait.
"""
HEADERS = [
    "case", "overlap", "collectives", "MB", "compute ms", "communication ms", "blocking ms", "ideal ms", "measured ms",
    "predicted ms", "error", "of the ideal", "hidden", f"faster than {BASE}",
]  # fmt: skip
WITHIN = 0.1  # the error that predictions should keep to


def rows(results: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """One for each mode, as tables and pages show them."""
    found: list[list[str]] = []
    for result in results:
        for mode, of in result["modes"].items():
            found.append([
                result["case"], mode, str(of["collectives"]), f"{of['bytes'] / 1e6:.0f}",
                *(_milliseconds(of[kind]) for kind in ("compute", "communication", "blocking", "ideal")),
                f"{_milliseconds(of['step'])} ({of['step']['low'] * 1e3:.0f}–{of['step']['high'] * 1e3:.0f})",
                f"{of['predicted']['seconds'] * 1e3:.0f}", f"{error(of):+.1%}",
                _percent(of["share"]), _percent(of["hidden"]), f"{of['speed_up']['median']:.2f}×",
            ])  # fmt: skip
    return found


def error(of: Mapping[str, Any], kind: str = "seconds") -> float:
    """kind: of what is predicted."""
    return of["predicted"][kind] / of["step"]["median"] - 1


def accuracy(modes: Iterable[Mapping[str, Any]], kind: str = "seconds") -> str:
    """How well several rows are predicted."""
    errors = [abs(error(of, kind)) for of in modes]
    within = sum(found <= WITHIN for found in errors)
    return (
        f"{within} of {len(errors)} rows are predicted within {WITHIN:.0%} of what was measured; "
        f"the mean error is {statistics.fmean(errors):.1%}, the largest {max(errors):.1%}."
    )


def sentence(result: Mapping[str, Any]) -> str:
    """What came of a case, beside what it was measured for."""
    if "error" in result:
        return f"{result['case']}: {result['error']}."
    best, unsplit = result["modes"][CALIBRATED], result["modes"][UNSPLIT]
    slower = unsplit["speed_up"]["median"] / best["speed_up"]["median"] - 1
    at = result["calibration"][-1]
    return (
        f"{result['case']} in `{at['lab']}`: compute : communication of `{CALIBRATED}` was calibrated to "
        f"{at['compute'] / at['communication']:.2f} and was {best['ratio']['median']:.2f} in the rounds. "
        f"`{CALIBRATED}` is {best['speed_up']['median']:.2f}× as fast as `{BASE}`, needs {abs(slower):.0%} "
        f"{'more' if slower > 0 else 'less'} time than `{UNSPLIT}`, and reaches {_percent(best['share'])} of the ideal."
        f"{_of_pairs(result['modes'].get(PAIRED))} {accuracy(result['modes'].values())}"
    )


def _of_pairs(mode: Mapping[str, Any] | None) -> str:
    if mode is None:
        return ""
    return (
        f" With micro-batches in pairs, whose compute : communication was {mode['ratio']['median']:.2f}, it reaches "
        f"{_percent(mode['share'])} of their ideal."
    )


def panels(results: Sequence[Mapping[str, Any]]) -> list[plot.Panel]:
    """One for each case."""
    kinds = {"blocking": "blocking", "measured": "step", "ideal": "ideal"}
    return [
        plot.Panel(
            result["case"], "", "seconds of a step",
            {name: [plot.Point.of(m, of[kind]) for m, of in result["modes"].items()] for name, kind in kinds.items()},
        )
        for result in results if result["modes"]
    ]  # fmt: skip


def page(folder: Path = RESULTS) -> str:
    """The whole page, from the result files that there are."""
    files = [folder / name for name in ("overlap_gpu.json", "overlap.json", "overlap_again.json")]
    found = {file.name: json.loads(file.read_text()) for file in files if file.exists()}
    modes = [
        (mode, of) for data in found.values() for result in data["results"] for mode, of in result["modes"].items()
    ]
    about_pairs = [PAIRS] if any(mode.endswith(", pairs") for mode, _ in modes) else []
    predicted = [PREDICTED, _overall([of for _, of in modes])] if modes else []
    return "\n".join([INTRO, *about_pairs, *predicted, *(_section(data, name) for name, data in found.items())])


def _overall(modes: Sequence[Mapping[str, Any]]) -> str:
    return f"{accuracy(modes)} If nothing were lost where ranks wait: {accuracy(modes, 'without')}\n"


def _section(data: Mapping[str, Any], file: str) -> str:
    machine, setting = data["machine"], data["setting"]
    on_gpu = setting["kind"]["device"] == "cuda"
    where = " and ".join(machine["gpus"]) if on_gpu else machine["processor"]
    only = f" --only '{setting['only']}'" if setting.get("only") else ""
    command = f"python benchmarks/overlap.py{' --gpu' if on_gpu else ''}{only} --rounds {setting['rounds']}"
    title = "Two ranks on one GPU" if on_gpu else "Two CPU ranks joined by a slow link"
    title += ", again" if file.endswith("_again.json") else ""
    lines = [f"## {title}", ""]
    lines += [f"`{command}` on {where} (torch {machine['torch']}), {machine['date']}. Data: [{file}]({file})."]
    lines += [report.busy(machine), ""]
    lines += [_model(result, setting["kind"]["dtype"]) for result in data["results"]]
    lines += ["", report.markdown(HEADERS, rows(data["results"])), ""]
    lines += [f"{sentence(result)}\n" for result in data["results"]]
    return "\n".join([*lines, *(f"{note}\n" for note in data.get("notes", ()))])


def _model(result: Mapping[str, Any], dtype: str) -> str:
    size = result["size"]
    return (
        f"- {result['case']}: Llama of {size['layers']} layers, width {size['width']}, "
        f"{size['samples']} × {size['tokens']} tokens, {dtype}."
    )


def _milliseconds(seconds: Mapping[str, float]) -> str:
    return f"{seconds['median'] * 1e3:.0f}"


def _percent(part: Mapping[str, float]) -> str:
    return f"{part['median']:.0%}"
