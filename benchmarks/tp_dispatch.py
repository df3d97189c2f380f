"""What splitting tensors costs a rank besides communication: segments, redistributions and their bookkeeping.

    python benchmarks/tp_dispatch.py [--rounds 20] [--out docs/results/tp_dispatch.json]

One rank's step under tp=2 with nothing sent, against a step of an unsplit model whose layers are as large as what that
rank holds: half the heads, half the inner width, half the vocabulary. Both compute the same products on one CPU thread,
in turn; what is compared is the processor time of that thread, which waiting and other processes do not change.
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

import plot
import report
from tp_dispatch_rank import Shape, compare

from phalanx.launch.worker_pool import WorkerPool

HEADERS = ["layers", "width", "tokens", "tp=1 ms", "tp=2 ms", "tp=2 / tp=1 (quartiles)", "instructions"]


RESULTS = Path(__file__).parent.parent / "docs" / "results"
INTRO = """# What splitting tensors costs besides communication

One rank's step under `tp=2` with nothing sent, against a step of an unsplit model whose layers are as large as what
that rank holds: half the heads, half the inner width, half the vocabulary. Both compute the same products on one CPU
thread, in turn. The difference is what segments, redistributions and their bookkeeping cost, and what the split
embedding and loss compute on top; times are processor times of that thread.
"""
SHAPES = (Shape(4, 256, 4, 64), Shape(4, 256, 8, 128), Shape(4, 512, 8, 128))


def main() -> None:
    options = _options()
    results: list[dict[str, Any]] = []
    with WorkerPool(2, threads_per_rank=1, device="cpu", environment=lambda _: {"GLOO_SOCKET_IFNAME": "lo"}) as pool:
        for shape in SHAPES:
            results.append({"shape": asdict(shape), **pool.run(compare, shape, options.rounds)[0]})
            print(report.table(HEADERS, rows(results[-1:])), flush=True)
    report.publish(options, "tp_dispatch", {"rounds": options.rounds}, results, _panels(results))


def rows(results: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """One for each shape, as tables show them."""
    found: list[list[str]] = []
    for result in results:
        shape, seconds, ratio = result["shape"], result["seconds"], result["ratio"]
        found.append([
            str(shape["layers"]), str(shape["width"]), f"{shape['samples']} × {shape['tokens']}",
            *(f"{seconds[name]['median'] * 1e3:.1f}" for name in ("tp=1", "tp=2")),
            f"{ratio['median']:.3f} ({ratio['low']:.3f}–{ratio['high']:.3f})",
            f"{result['instructions']['tp=1']} and {result['instructions']['tp=2']}",
        ])  # fmt: skip
    return found


def page(folder: Path = RESULTS) -> str:
    """The whole page, from the result file."""
    data = json.loads((folder / "tp_dispatch.json").read_text())
    machine = data["machine"]
    command = f"python benchmarks/tp_dispatch.py --rounds {data['setting']['rounds']}"
    where = f"{machine['processor']} (torch {machine['torch']}), {machine['date']}"
    lines = [f"`{command}` on {where}. Data: [tp_dispatch.json](tp_dispatch.json).", report.busy(machine), ""]
    return "\n".join([INTRO, *lines, report.markdown(HEADERS, rows(data["results"])), ""])


def _panels(results: Sequence[Mapping[str, Any]]) -> list[plot.Panel]:
    points = [
        plot.Point.of(f"{r['shape']['width']} wide, {r['shape']['samples'] * r['shape']['tokens']} tokens", r["ratio"])
        for r in results
    ]
    title = "Processor time of a rank's step, communication excluded"
    return [plot.Panel(title, "", "tp=2 / tp=1", {"measured": points}, level=1.0)]


def _options() -> argparse.Namespace:
    parser = report.options(__doc__ or "")
    parser.add_argument("--rounds", type=int, default=20, help="steps of each (default: 20)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
