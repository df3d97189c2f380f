"""The largest model of a family that trains within so much memory of one GPU: tokens per second, peaks, MFU.

    python benchmarks/largest.py --cap 16 --layers 19 [--plans PLAN …] [--free-plans PLAN …] [--peers fsdp2 hf]

Every candidate trains Llama-3-8B with so many layers, in bfloat16 with float32 masters and AdamW, 64k tokens a step,
in a process of its own. `--plans` run under the cap (`torch.cuda.set_per_process_memory_fraction`), `--free-plans` with
the whole card: what the cap costs is the ratio of the two. Peers run under the cap too: FSDP2 with its parameters,
gradients and optimizer on the CPU, and plain HuggingFace, both with gradient checkpointing. MFU counts no recomputed
FLOPs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import report

from phalanx.planning.precision import peak_flops

RESULTS = Path(__file__).parent.parent / "docs" / "results"
MODEL = "meta-llama/Meta-Llama-3-8B"
ALL_ON_HOST = "mb=16,schedule=block-major,recompute=block,offload=activations+parameters+optimizer-step"
PEERS = ("fsdp2", "hf")
HEADERS = [
    "cap", "parameters", "candidate", "s/step", "tokens/s", "MFU", "predicted GiB", "peak GiB", "on host GiB",
    "ready s",
]  # fmt: skip


def parser() -> argparse.ArgumentParser:
    given = report.options(__doc__ or "")
    given.add_argument("--cap", type=float, help="GiB of the device (default: all of it)")
    given.add_argument("--layers", type=int, default=19)
    given.add_argument("--batch", type=int, default=16)
    given.add_argument("--tokens", type=int, default=4096)
    given.add_argument("--plans", nargs="*", default=[ALL_ON_HOST])
    given.add_argument("--free-plans", nargs="*", default=[])
    given.add_argument("--peers", nargs="*", default=[], choices=PEERS)
    given.add_argument("--steps", type=int, default=4)
    given.add_argument("--uncounted", type=int, default=2, help="of them, the first so many")
    given.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: a tiny model, to try it")
    given.add_argument("--one", help=argparse.SUPPRESS)
    return given


def main() -> None:
    options = parser().parse_args()
    if options.one:
        print(json.dumps(_one(options)))
        return
    results: list[dict[str, Any]] = []
    gpu = "".join(report.machine()["gpus"][:1])
    free = [(plan, False) for plan in options.free_plans]
    for candidate, capped in [(plan, True) for plan in (*options.plans, *options.peers)] + free:
        found = _in_own_process(candidate, options.cap if capped else None)
        results.append(
            {"candidate": candidate, "cap": options.cap if capped else None, "layers": options.layers} | found
        )
        print(row(results[-1], gpu), file=sys.stderr, flush=True)
    print(report.table(HEADERS, [row(result, gpu) for result in results]))
    setting = {name: getattr(options, name) for name in ("cap", "layers", "batch", "tokens", "steps")}
    report.publish(options, "largest", setting | {"model": MODEL}, results, [])


def _in_own_process(candidate: str, cap: float | None) -> dict[str, Any]:
    """Its host memory is given back when it ends."""
    command = [sys.executable, __file__, *sys.argv[1:], "--one", f"{candidate} {cap or 0}"]
    finished = subprocess.run(command, capture_output=True, text=True)
    if finished.returncode:
        lines = finished.stderr.strip().splitlines() or [f"ended with {finished.returncode}"]
        return {"error": next((line for line in lines if "out of memory" in line), lines[-1])}
    return json.loads(finished.stdout.strip().splitlines()[-1])


def _one(options: argparse.Namespace) -> dict[str, Any]:
    import torch
    from one_rank import captured_model

    from phalanx import tasks
    from phalanx.engine.step import training_flops

    candidate, cap = options.one.rsplit(" ", 1)
    if float(cap) and options.device == "cuda":
        torch.cuda.set_per_process_memory_fraction(float(cap) * 2**30 / torch.cuda.mem_get_info()[1])
    started = time.perf_counter()
    tiny = options.device == "cpu"
    spec, captured = captured_model(
        MODEL, "bfloat16", tiny=tiny, **({} if tiny else {"num_hidden_layers": options.layers})
    )
    samples, tokens = (16, 32) if tiny else (options.batch, options.tokens)
    batch = tasks.get(spec.task).synthetic(spec.config, batch=samples, tokens=tokens, seed=0)
    result: dict[str, Any] = {
        "parameters": sum(shape.numel() for shape in map(torch.Size, captured.shapes.values())),
        "tokens": samples * tokens, "flops": training_flops(captured, batch, [1] * samples),
    }  # fmt: skip
    if candidate in PEERS:
        import largest_peers

        step = getattr(largest_peers, candidate)(spec, batch, options.device)
    else:
        step, predicted = _phalanx(captured, candidate, batch, options.device)
        result |= {"predicted": sum(predicted.device.values()), "on_host": sum(predicted.host.values())}
    return result | _timed(step, options, started)


def _phalanx(captured: Any, text: str, batch: Any, device: str) -> tuple[Any, Any]:
    from one_rank import on_device, open_session

    from phalanx.engine.memory import RankMemory, rank_memory
    from phalanx.engine.step import micro_batches
    from phalanx.plan.complete import complete

    samples = len(next(iter(batch.values())))
    plan = complete(text, world=1, batch_size=samples, costs=[1.0] * len(captured.blocks.blocks)).plan
    predicted = RankMemory({}, {})

    def look(compiled: Any, _: object) -> Any:
        nonlocal predicted
        predicted = rank_memory(compiled, micro_batches(compiled.training.feeder, compiled.plan, batch, 0))
        return compiled

    session = open_session(captured, plan, device, look=look, batch_size=samples, dtype="bfloat16", master_weights=True)
    fed = on_device(batch, device)
    return lambda: session.step(fed, 0, 1e-4).read(), predicted


def _timed(step: Any, options: argparse.Namespace, started: float) -> dict[str, Any]:
    import torch

    seconds: list[float] = []
    uncounted, device, ready = options.uncounted, options.device, 0.0
    for number in range(options.steps):
        if number == uncounted and device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - begin)
        print(f"step {number + 1}: {seconds[-1]:.2f} s", file=sys.stderr, flush=True)
        if number + 1 == uncounted:
            ready = time.perf_counter() - started
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else 0
    reserved = torch.cuda.max_memory_reserved() if device == "cuda" else 0
    return {
        "seconds": seconds[uncounted:],
        "ready": ready,
        "peak": peak,
        "reserved": reserved,
        "first": seconds[:uncounted],
    }


def row(r: dict[str, Any], gpu: str) -> list[str]:
    cap = f"{r['cap']:.0f} GiB" if r["cap"] else "–"
    if "error" in r:
        return [cap, f"{r['layers']} layers", r["candidate"], r["error"], *[""] * 6]
    seconds = _median(r)
    predicted = [
        _gib(r["predicted"]) if "predicted" in r else "–",
        _gib(r["peak"]),
        _gib(r["on_host"]) if "on_host" in r else "–",
    ]
    return [
        cap, f"{r['parameters'] / 1e9:.2f}B", r["candidate"], f"{seconds:.2f}", f"{r['tokens'] / seconds:,.0f}",
        _mfu(r["flops"] / seconds, gpu), *predicted, f"{r['ready']:.0f}",
    ]  # fmt: skip


def _mfu(rate: float, gpu: str) -> str:
    peak = peak_flops(gpu, "bfloat16")
    return f"{rate / peak:.1%}" if peak else "–"


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f}"


def page() -> str:
    data = json.loads((RESULTS / "largest.json").read_text())
    machine, results = data["machine"], data["results"]
    return "\n".join([
        "# The largest model within so much memory", "",
        f"`python benchmarks/largest.py` on one {machine['gpus'][0]} (torch {machine['torch']}, {machine['cores']} "
        f"cores), {machine['date']}. Data: [largest.json](largest.json). Llama-3-8B with more or fewer layers, "
        "bfloat16 with float32 masters and AdamW, 16 × 4096 tokens a step. A cap is the share of the card that the "
        "process may use; without one it may use all. MFU counts no recomputed FLOPs.", "",
        report.markdown(HEADERS, [row(result, machine["gpus"][0]) for result in results]), "", *_prices(results), "",
        *data.get("notes", []), "",
    ])  # fmt: skip


def _prices(results: Sequence[dict[str, Any]]) -> list[str]:
    """What each cap costs: the fastest under it beside the fastest of the same layers without one, of one run."""
    lines: list[str] = []
    good = [r for r in results if "seconds" in r]
    for cap in sorted({r["cap"] for r in good if r["cap"]}):
        own, free = _compared([r for r in good if r["cap"] == cap], [r for r in good if not r["cap"]])
        share = f", at {_median(free) / _median(own):.2f}× the tokens/s of the whole card" if free else ""
        lines.append(f"- {own['parameters'] / 1e9:.2f}B parameters within {cap:.0f} GiB{share}.")
    return lines


def _compared(capped: list[dict[str, Any]], free: list[dict[str, Any]]) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """The fastest of both that have the same layers and ran in turn; else the fastest under the cap."""
    pairs = [(a, b) for a in capped for b in free if (a["layers"], a.get("run")) == (b["layers"], b.get("run"))]
    if not pairs:
        return min(capped, key=_median), None
    return min(pairs, key=lambda pair: (_median(pair[0]), _median(pair[1])))


def _median(r: dict[str, Any]) -> float:
    return statistics.median(r["seconds"])


if __name__ == "__main__":
    main()
