"""Overlap: every mode of tensor parallelism's communication, beside its computation, its communication and the ideal.

    python benchmarks/overlap.py [--rounds 8] [--only 'H 512'] [--out docs/results/overlap.json]
    python benchmarks/overlap.py --gpu [--out docs/results/overlap_gpu.json]
    python benchmarks/overlap.py --predict docs/results/overlap*.json

Two ranks split a Llama (tp=2): CPU ranks on two nodes of a lab that a slow link joins (root, ip and tc are needed), or
with --gpu ranks that share one GPU. First the link, or each rank's share of the GPU, is set so that the computation of
`oases` takes about as long as its communication. Then all modes, two of them also with micro-batches in pairs, run in
turn: a step, the same step with nothing sent (compute), the same collectives one after the other with nothing computed
(communication). Blocking is the sum of the two, the ideal the longer one; figures are formed within a round. What is
predicted of each mode is written beside (`overlap_prediction.py`); --predict writes it anew, from what was measured.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import in_lab
import overlap_rank
import report
from compare_setting import Setting, Size
from overlap_cases import AIM, CALIBRATED, CPU, GPU, MODES, Case, Kind
from overlap_figures import figures
from overlap_page import HEADERS, panels, rows, sentence
from overlap_prediction import Case as Predicted
from overlap_prediction import predictions
from overlap_rank import Task

from phalanx.errors import PhalanxError
from phalanx.model.captured import Captured
from phalanx.plan.complete import complete
from phalanx.plan.plan import Plan

ATTEMPTS = 4


def main() -> None:
    options = _options()
    for file in options.predict:
        predict_anew(file)
    if not options.predict:
        run(options)


def run(options: argparse.Namespace) -> None:
    kind = GPU if options.gpu else CPU
    setting = {"kind": asdict(kind), "aim": AIM, "rounds": options.rounds, "compile": options.compile}
    setting |= {"only": options.only} if options.only else {}
    results: list[dict[str, Any]] = []
    for case in (case for case in kind.cases if options.only in case.name):
        found = measure(kind, case, options.rounds, options.compile)
        results.append(found)
        print(report.table(HEADERS, rows([found])), sentence(found), sep="\n", flush=True)
        report.publish(options, "overlap", setting, results, panels(results))  # after each: a run may be cut short


def measure(kind: Kind, case: Case, rounds: int, compiled: str) -> dict[str, Any]:
    """One case, calibrated and timed; where the calibration fails, why."""
    setting = _setting(case.size, kind.dtype)
    captured = setting.capture()
    task = Task(setting, _plans(setting, captured), kind.accepted, rounds, kind.steps, kind.device, compiled)
    amount, tried = case.start, list[dict[str, Any]]()
    for _ in range(ATTEMPTS):
        seen = in_lab.run(
            kind.lab(amount), overlap_rank.measure, task, captured, device=kind.device, variables=kind.variables
        )
        compute, communication = seen[0].calibration
        tried.append({"lab": kind.lab(amount), "compute": compute, "communication": communication})
        ratio = compute / communication
        in_lab.say(f"{case.name}, {kind.lab(amount)}: {CALIBRATED} has compute : communication {ratio:.2f}")
        if seen[0].seconds:
            modes = with_predictions(Predicted(setting, captured, task.plans, kind.device, figures(seen, kind.dtype)))
            return {"case": case.name, "size": asdict(case.size), "calibration": tried, "modes": modes}
        amount = kind.next_amount(amount, ratio)
    low, high = kind.accepted
    return {"case": case.name, "size": asdict(case.size), "calibration": tried, "modes": {},
            "error": f"compute : communication did not come between {low} and {high}"}  # fmt: skip


def with_predictions(case: Predicted) -> dict[str, dict[str, Any]]:
    found = predictions(case)
    return {mode: {**of, "predicted": found[mode]} for mode, of in case.modes.items()}


def predict_anew(file: Path) -> None:
    """In a file of results, from what it says was measured."""
    data = json.loads(file.read_text(encoding="utf-8"))
    for result in (result for result in data["results"] if result["modes"]):
        result["modes"] = with_predictions(case_of(data["setting"]["kind"], result))
    file.write_text(json.dumps(data, indent=1), encoding="utf-8")


def case_of(kind: Mapping[str, Any], result: Mapping[str, Any]) -> Predicted:
    """As results have them."""
    setting = _setting(Size(**result["size"]), kind["dtype"])
    captured = setting.capture()
    return Predicted(setting, captured, _plans(setting, captured), kind["device"], result["modes"])


def _setting(size: Size, dtype: str) -> Setting:
    return Setting("llama", size, dtype, masters=dtype == "float32")


def _plans(setting: Setting, captured: Captured) -> dict[str, Plan]:
    costs = captured.blocks.flops(captured.dims(setting.batch()))
    samples = setting.size.samples
    return {
        mode: complete(f"tp=2,{text}", world=2, batch_size=samples, costs=costs).plan for mode, text in MODES.items()
    }


def _options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = report.options(__doc__ or "")
    parser.add_argument("--gpu", action="store_true", help="2 ranks that share one GPU, instead of CPU ranks")
    parser.add_argument(
        "--predict", type=Path, nargs="+", metavar="FILE", default=[],
        help="run nothing: write the predictions in these results anew",
    )  # fmt: skip
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--rounds", type=int, default=8, help="measurements of each mode (default: 8)")
    parser.add_argument(
        "--compile", default="off", choices=("off", "inductor"),
        help="how segments run (default: off; compiling every mode's segments takes minutes)",
    )  # fmt: skip
    return parser.parse_args(arguments)


if __name__ == "__main__":
    try:
        main()
    except PhalanxError as error:
        raise SystemExit(str(error)) from None
