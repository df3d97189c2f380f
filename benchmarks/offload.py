"""What activations on the host cost: peak memory against the time of a step, and how much of the copies nothing hid.

    python benchmarks/offload.py [--model meta-llama/Llama-3.2-1B] [--batch 4] [--tokens 4096] [--plans mb=1 …]

The first plan is what the others are compared with; it is measured again at the end, to show how far the machine
drifts. Of each plan one further step runs under torch's profiler: *exposed* is the time in which copies ran and nothing
was computed, *of the link* how fast they were beside a plain copy to the host.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import gpu_trace
import plot
import report
from memory import timed_session

RESULTS = Path(__file__).parent.parent / "docs" / "results"
COUNTS = (2, 3, 4, 5, 6, 8, 0)
PLANS = (
    "mb=1",
    *(f"mb=1,offload=activations:{count}" if count else "mb=1,offload=activations" for count in COUNTS),
    "mb=1,recompute=light",
    *(f"mb=1,recompute=light,offload=activations:{count}" for count in COUNTS[:-1]),
)
HEADERS = ["plan", "peak GiB", "peak", "ms/step", "time", "out GiB", "in GiB", "copies ms", "exposed ms", "of the link"]


def main() -> None:
    options = _options()
    results: list[dict[str, Any]] = []
    link = link_rate() if options.device == "cuda" else 0.0
    setting = {name: value for name, value in vars(options).items() if name not in ("out", "plot")} | {"link": link}
    for plan in (*options.plans, options.plans[0]):
        results.append({"plan": plan} | _attempt(plan, options))
        print(row(results[-1], results[0], link), file=sys.stderr, flush=True)
        report.publish(options, "offload", setting, results, [_panel(results)])
    print(report.table(HEADERS, [row(result, results[0], link) for result in results]))


def _options() -> argparse.Namespace:
    parser = report.options(__doc__ or "")
    parser.add_argument("--model", default="meta-llama/Llama-3.2-1B")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--plans", nargs="+", default=PLANS)
    parser.add_argument("--no-masters", action="store_true", help="bfloat16 alone")
    parser.add_argument("--steps", type=int, default=12, help="the first two are not counted")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: a tiny model, to try it")
    return parser.parse_args()


def _attempt(plan: str, options: argparse.Namespace) -> dict[str, Any]:
    import torch

    from phalanx.errors import PhalanxError

    try:
        return measure(plan, options)
    except (PhalanxError, RuntimeError) as error:
        return {"error": str(error).splitlines()[0]}
    finally:
        gc.collect()
        if options.device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


def measure(plan: str, options: argparse.Namespace) -> dict[str, Any]:
    import torch

    given = {"dtype": "bfloat16", "master_weights": not options.no_masters}
    session, batch, seconds = timed_session(options, plan, given)
    result: dict[str, Any] = {"seconds": seconds}
    if options.device == "cuda":
        result["peak"] = torch.cuda.max_memory_allocated()
        result |= _copies(lambda: session.step(batch, 0, 1e-4).read())
    session.close()
    return result


def _copies(step: Any) -> dict[str, Any]:
    done = gpu_trace.traced(step)
    moving = gpu_trace.busy(done, gpu_trace.OUT, gpu_trace.IN)
    return {
        "bytes_out": sum(each.size for each in done if each.kind == gpu_trace.OUT),
        "bytes_in": sum(each.size for each in done if each.kind == gpu_trace.IN),
        "copying": gpu_trace.length(moving),
        "exposed": gpu_trace.length(gpu_trace.without(moving, gpu_trace.busy(done, "compute"))),
        "timeline": gpu_trace.picture(done),
    }


def link_rate(size: int = 2**30) -> float:
    """Bytes a second to the host, plainly copied, into pinned memory."""
    import time

    import torch

    here = torch.empty(size, dtype=torch.uint8, device="cuda")
    there = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    seconds: list[float] = []
    for _ in range(5):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        there.copy_(here, non_blocking=True)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    return size / statistics.median(seconds)


def row(r: dict[str, Any], first: dict[str, Any], link: float) -> list[str]:
    if "error" in r:
        return [r["plan"], r["error"], *[""] * (len(HEADERS) - 2)]
    seconds, compared = statistics.median(r["seconds"]), statistics.median(first["seconds"])
    if "peak" not in r:
        return [r["plan"], "–", "–", f"{seconds * 1e3:.1f}", f"{seconds / compared - 1:+.1%}", *["–"] * 5]
    return [
        r["plan"], _gib(r["peak"]), f"{r['peak'] / first['peak'] - 1:+.1%}", f"{seconds * 1e3:.1f}",
        f"{seconds / compared - 1:+.1%}", _gib(r["bytes_out"]), _gib(r["bytes_in"]), f"{r['copying'] * 1e3:.1f}",
        f"{r['exposed'] * 1e3:.1f}", _of_link(r, link),
    ]  # fmt: skip


def _of_link(r: dict[str, Any], link: float) -> str:
    moved = r["bytes_out"] + r["bytes_in"]
    return f"{moved / r['copying'] / link:.0%}" if link and moved > 2**28 else "–"


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f}"


def page() -> str:
    """Of all that was measured, one file for each setting."""
    about = (__doc__ or "").split("\n\n")[2].replace("\n", " ").strip()
    parts = [_part(file.name, json.loads(file.read_text())) for file in sorted(RESULTS.glob("offload*.json"))]
    return "\n".join(["# Activations on the host: memory against time", "", about, *(x for p in parts for x in p), ""])


def _part(name: str, data: dict[str, Any]) -> list[str]:
    own, machine, results = data["setting"], data["machine"], data["results"]
    masters = "bfloat16" if own["no_masters"] else "bfloat16 with float32 masters"
    return [
        "", f"## {own['model']}, {own['batch']} × {own['tokens']} tokens", "",
        f"`python benchmarks/offload.py --model {own['model']} --batch {own['batch']}`, one {machine['gpus'][0]} "
        f"(torch {machine['torch']}), {machine['date']}, {masters}, AdamW. Data: [{name}]({name}).", "",
        report.markdown(HEADERS, [row(result, results[0], own["link"]) for result in results]), *_timeline(results),
        *(line for note in data.get("notes", []) for line in ("", note)),
    ]  # fmt: skip


def _timeline(results: Sequence[dict[str, Any]]) -> list[str]:
    """Of the plans that cost no more than 5 %, the one that moves most."""
    most = 1.05 * statistics.median(results[0]["seconds"])
    cheap = [r for r in results if "timeline" in r and statistics.median(r["seconds"]) <= most]
    if not cheap:
        return []
    shown = max(cheap, key=lambda r: r["bytes_out"])
    return ["", f"One step of `{shown['plan']}` on the GPU:", "", "```text", shown["timeline"], "```"]


def _panel(results: Sequence[dict[str, Any]]) -> plot.Panel:
    good = [r for r in results if "peak" in r]
    points = [plot.Point.of(r["peak"] / 2**30, report.summary(r["seconds"])) for r in good]
    return plot.Panel("Activations on the host", "peak GiB", "seconds of a step", {"measured": points})


if __name__ == "__main__":
    main()
