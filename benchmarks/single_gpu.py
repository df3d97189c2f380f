"""One GPU: tokens per second and peak memory of Phalanx beside plain HuggingFace training, same model, batch,
precision.

    python benchmarks/single_gpu.py [--model meta-llama/Llama-3.2-1B] [--batch 4] [--tokens 4096] [--rounds 2]

Candidates, each in a process of its own, in turn for every round: HuggingFace eager (SDPA attention), the whole model
under torch.compile, each layer under torch.compile, and Phalanx. All train bfloat16 weights with fused AdamW (bfloat16
state, no clipping), so that they differ in nothing but how the step is executed. A last row shows Phalanx as it
trains by default: float32 master weights and clipping.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import plot
import report

CANDIDATES = ("eager", "compiled", "compiled layers", "phalanx", "phalanx, masters")
WARM_UP, TIMED, GROUP = 4, 20, 5


def main() -> None:
    options = _options()
    if options.candidate:
        print(json.dumps(measure(options)))
        return
    _require_gpu()
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in CANDIDATES}
    for _ in range(options.rounds):
        for name in CANDIDATES:
            runs[name].append(_in_own_process(name))
            print(f"{name}: {runs[name][-1]}", file=sys.stderr, flush=True)
    results = [_combine(name, found) for name, found in runs.items()]
    print(_table(results))
    setting = {name: value for name, value in vars(options).items() if name not in ("out", "plot", "candidate")}
    report.publish(options, "single_gpu", setting, results, [_panel(results)])


def _require_gpu() -> None:
    import torch

    if not torch.cuda.is_available():
        raise SystemExit("single_gpu needs a CUDA device, and none can be used; phalanx env shows what there is")


def _panel(results: list[dict[str, Any]]) -> plot.Panel:
    points = [plot.Point.of(r["candidate"], r["seconds"]) for r in results if "error" not in r]
    return plot.Panel("One GPU beside plain HuggingFace", "", "seconds of a step", {"measured": points})


def _options() -> argparse.Namespace:
    parser = report.options(__doc__ or "")
    parser.add_argument("--model", default="meta-llama/Llama-3.2-1B")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--candidate", choices=CANDIDATES, help=argparse.SUPPRESS)
    return parser.parse_args()


def _in_own_process(candidate: str) -> dict[str, Any]:
    command = [sys.executable, __file__, *sys.argv[1:], "--candidate", candidate]
    finished = subprocess.run(command, capture_output=True, text=True)
    if finished.returncode:
        return {"error": finished.stderr.strip().splitlines()[-1] if finished.stderr.strip() else "failed"}
    return json.loads(finished.stdout.strip().splitlines()[-1])


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Step times in groups of steps, without waiting for the device inside a group: as in real training."""
    import torch

    torch.manual_seed(0)
    started = time.perf_counter()
    step, flops = _build(options)
    for _ in range(WARM_UP):
        step()
    _synchronise(options.device)
    ready = time.perf_counter() - started
    if options.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds: list[float] = []
    for _ in range(TIMED // GROUP):
        begin = time.perf_counter()
        for _ in range(GROUP):
            step()
        _synchronise(options.device)
        seconds.append((time.perf_counter() - begin) / GROUP)
    peak = torch.cuda.max_memory_allocated() if options.device == "cuda" else 0
    result = {"seconds": seconds, "peak_bytes": peak, "ready_seconds": ready, "flops": flops}
    return result | {"kernels": _kernels(step, options.device)}


def _synchronise(device: str) -> None:
    import torch

    if device == "cuda":
        torch.cuda.synchronize()


def _build(options: argparse.Namespace) -> tuple[Callable[[], object], float]:
    import torch

    from phalanx import tasks
    from phalanx.engine.step import training_flops
    from phalanx.model.capture import capture
    from phalanx.model.zoo import zoo

    spec = zoo.resolve(options.model, tiny=options.device == "cpu")
    task = tasks.get(spec.task)
    batch = task.synthetic(spec.config, batch=options.batch, tokens=options.tokens, seed=0)
    captured = capture(spec, task.inputs(spec.config), dtype=torch.bfloat16, dropout=0.0, check=False)
    flops = training_flops(captured, batch, [options.batch])
    if options.candidate.startswith("phalanx"):
        return _phalanx(captured, batch, options), flops
    return _huggingface(spec, batch, options), flops


def _huggingface(spec: Any, batch: dict[str, Any], options: argparse.Namespace) -> Callable[[], object]:
    import torch

    from phalanx.model.zoo import zoo

    torch.set_default_device(options.device)
    model = zoo.build(spec, dtype=torch.bfloat16, attention="sdpa", dropout=0.0).to(options.device)
    torch.set_default_device(None)
    if options.candidate == "compiled":
        model.compile()
    elif options.candidate == "compiled layers":
        from phalanx.model.graph.units import find_layers

        for layers in find_layers(model):
            for layer in model.get_submodule(layers.path):
                layer.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1, fused=True)
    inputs = {name: tensor.to(options.device) for name, tensor in batch.items()}

    def step() -> object:
        loss = model(**inputs).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    return step


def _phalanx(captured: Any, batch: dict[str, Any], options: argparse.Namespace) -> Callable[[], object]:
    import torch

    from phalanx.config import RunConfig
    from phalanx.launch.context import RankContext, local_device
    from phalanx.plan.plan import Plan
    from phalanx.session.session import Session

    context = RankContext.alone(local_device(options.device, 0))
    by_default = options.candidate == "phalanx, masters"

    def random_values(name: str, is_master: bool, _: object) -> torch.Tensor:
        values = torch.empty(captured.shapes[name], device=context.device, dtype=torch.float32)
        return values.normal_(0, 0.02) if values.dim() > 1 else values.fill_(1.0)

    config = RunConfig(
        lr=1e-4, betas=(0.9, 0.999), weight_decay=0.1, clip=1.0 if by_default else None, dtype="bfloat16",
        master_weights=by_default, device=options.device, batch_size=options.batch,
    )  # fmt: skip
    session = Session.open(
        captured, config, Plan(stages=(len(captured.blocks.blocks),)), context=context, trainable=captured.trainable,
        read=random_values, buffers={name: b.to(context.device) for name, b in captured.buffers.items()},
    )  # fmt: skip
    on_device = {name: tensor.to(context.device) for name, tensor in batch.items()}
    return lambda: session.step(on_device, 0, 1e-4)


_KINDS = {
    "attention": ("sdpa", "flash", "fmha", "cudnn::fusion", "attention"),
    "matrix products": ("nvjet", "gemm", "cutlass", "splitK", "cublas"),
    "optimizer": ("multi_tensor_apply", "FusedOptimizer", "FusedAdam"),
}


def _kernels(step: Callable[[], object], device: str) -> dict[str, float]:
    """Milliseconds of one step by kind of kernel."""
    if device != "cuda":
        return {}
    import torch
    from torch.profiler import ProfilerActivity, profile

    step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(3):
            step()
        torch.cuda.synchronize()
    spans: dict[str, list[tuple[float, float]]] = {}
    for event in profiler.events() or []:
        if event.device_type == torch.autograd.DeviceType.CUDA:
            kind = next((k for k, words in _KINDS.items() if any(word in event.name for word in words)), "element-wise")
            spans.setdefault(kind, []).append((event.time_range.start, event.time_range.end))
    return {kind: round(_covered(found) / 3e3, 2) for kind, found in spans.items()}


def _covered(spans: list[tuple[float, float]]) -> float:
    """The time in which at least one of these spans runs: kernels on two streams may overlap."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def _combine(name: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    good = [run for run in runs if "error" not in run]
    if not good:
        return {"candidate": name, "error": runs[0]["error"]}
    seconds = [s for run in good for s in run["seconds"]]
    return {
        "candidate": name, "seconds": report.summary(seconds), "peak_bytes": max(run["peak_bytes"] for run in good),
        "ready_seconds": good[0]["ready_seconds"], "kernels": good[-1]["kernels"], "flops": good[0]["flops"],
    }  # fmt: skip


def _table(results: list[dict[str, Any]]) -> str:
    import torch

    from phalanx.observe.metrics import device_peak_flops

    options = _options()
    best = min(r["seconds"]["median"] for r in results[:3] if "error" not in r)
    rows: list[list[str]] = []
    for r in results:
        if "error" in r:
            rows.append([r["candidate"], r["error"][:60], *[""] * 6])
            continue
        median = r["seconds"]["median"]
        peak = device_peak_flops(torch.device(options.device), "bfloat16") if options.device == "cuda" else None
        rows.append([
            r["candidate"], f"{median * 1e3:.1f} ({r['seconds']['low'] * 1e3:.1f}–{r['seconds']['high'] * 1e3:.1f})",
            f"{options.batch * options.tokens / median:,.0f}", f"{best / median:.2f}×",
            f"{r['flops'] / median / peak:.1%}" if peak else "–", f"{r['peak_bytes'] / 2**30:.1f}",
            f"{r['ready_seconds']:.0f}", ", ".join(f"{k} {v}" for k, v in r["kernels"].items()),
        ])  # fmt: skip
    headers = ["candidate", "ms/step (spread)", "tokens/s", "vs best plain", "MFU", "GiB", "ready s", "ms by kind"]
    return report.table(headers, rows)


if __name__ == "__main__":
    main()
