"""Attention beyond the plain kind on one GPU: kernels side by side, forward and backward.

    python benchmarks/attention.py [--rounds 5] [--out docs/results/attention.json]

Dropout, packed documents, soft caps and biases are what fused kernels of PyTorch cannot do, or not all. `tiles` is what
Phalanx runs then, `chunks` what it ran before and still does without Triton, and `torch` is its
scaled_dot_product_attention given the same mask, bias and dropout, with keys and values repeated for all heads.
Candidates run in turn.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import plot
import report

RESULTS = Path(__file__).parent.parent / "docs" / "results"
HEADERS = [
    "case",
    "shape",
    "tiles ms",
    "chunks ms",
    "torch ms",
    "against chunks",
    "against torch",
    "GiB: tiles, chunks, torch",
]
TILES, CHUNKS, TORCH = "tiles", "chunks", "torch"


@dataclass(frozen=True)
class Case:
    """documents: packed into each sequence. bias: of every pair of tokens, trained, as T5 has it."""

    name: str
    samples: int
    heads: int
    kv_heads: int
    tokens: int
    dim: int
    dtype: str = "bfloat16"
    causal: bool = True
    dropout: float = 0.0
    documents: int = 0
    softcap: float = 0.0
    bias: bool = False


CASES = (
    Case("GPT-2, dropout 0.1", 8, 12, 12, 1024, 64, dropout=0.1),
    Case("Llama 3.2 1B, 16 packed documents", 2, 32, 8, 4096, 64, documents=16),
    Case("Llama 3 8B, 16 packed documents", 1, 32, 8, 4096, 128, documents=16),
    Case("Gemma 2, soft cap", 1, 8, 4, 4096, 256, softcap=50.0),
    Case("T5, trained bias", 16, 8, 8, 512, 64, causal=False, bias=True),
    Case("GPT-2, dropout 0.1, float32", 8, 12, 12, 1024, 64, dtype="float32", dropout=0.1),
)


def main() -> None:
    parser = report.options(__doc__ or "")
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each candidate (default: 5)")
    options = parser.parse_args()
    _require_gpu()
    results = [measure(case, options.rounds) for case in CASES]
    print(report.table(HEADERS, [row(result) for result in results]))
    report.publish(options, "attention", {"rounds": options.rounds}, results, [_panel(results)])


def _require_gpu() -> None:
    import torch

    if not torch.cuda.is_available():
        raise SystemExit("attention needs a CUDA device, and none can be used; phalanx env shows what there is")


def measure(case: Case, rounds: int) -> dict[str, Any]:
    candidates = _candidates(case)
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    memory = {name: _peak(work) for name, work in candidates.items()}  # also compiles
    for _ in range(rounds):
        for name, work in candidates.items():
            seconds[name].append(_seconds(work))
    found = {name: report.summary(values) for name, values in seconds.items()}
    return {"case": asdict(case), "seconds": found, "bytes": memory}


def _candidates(case: Case) -> dict[str, Callable[[], object]]:
    """Each computes the output and all gradients of the same tensors."""
    import torch

    from phalanx.model.ops.kernels import Attention, Chunked, Kernel
    from phalanx.model.ops.tiled import Tiled

    torch.manual_seed(0)
    dtype = getattr(torch, case.dtype)
    q, k, v, d_out = (
        torch.randn(case.samples, case.tokens, heads, case.dim, device="cuda", dtype=dtype).transpose(1, 2)
        for heads in (case.heads, case.kv_heads, case.kv_heads, case.heads)
    )
    ids = None
    if case.documents:
        numbers = torch.arange(case.tokens, device="cuda") // (case.tokens // case.documents) + 1
        ids = numbers.expand(case.samples, case.tokens).contiguous()
    shape = (1, case.heads, case.tokens, case.tokens)
    bias = torch.randn(shape, device="cuda", dtype=dtype) if case.bias else None
    keys = torch.arange(case.samples, device="cuda") if case.dropout else None
    spec = Attention(ids, ids, bias, keys, case.causal, case.dim**-0.5, 0, case.softcap, case.dropout)

    def own(kernel: Kernel) -> Callable[[], object]:
        def work() -> None:
            out, lse = kernel.forward(q, k, v, spec)
            kernel.backward(d_out, q, k, v, out, lse, spec)

        return work

    found = {TILES: own(Tiled()), CHUNKS: own(Chunked())}
    return found if case.softcap else found | {TORCH: _torch(case, q, k, v, d_out, ids, bias)}


def _torch(case: Case, q: Any, k: Any, v: Any, d_out: Any, ids: Any, bias: Any) -> Callable[[], object]:
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    wide = [x.repeat_interleave(case.heads // x.shape[1], dim=1) for x in (q, k, v)]
    leaves = [x.detach().requires_grad_() for x in (*wide, *([bias] if case.bias else []))]
    mask = leaves[3] if case.bias else None
    if ids is not None:
        causal = torch.ones(case.tokens, case.tokens, dtype=torch.bool, device="cuda").tril()
        mask = (ids[:, None, :, None] == ids[:, None, None, :]) & causal

    def work() -> None:
        out = scaled_dot_product_attention(
            *leaves[:3], attn_mask=mask, dropout_p=case.dropout, is_causal=case.causal and mask is None
        )
        torch.autograd.grad(out, leaves, d_out)

    return work


def _seconds(work: Callable[[], object]) -> float:
    import torch

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    work()
    begin.record()
    for _ in range(3):
        work()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 3e3


def _peak(work: Callable[[], object]) -> int:
    import torch

    work()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def row(result: dict[str, Any]) -> list[str]:
    seconds, memory = result["seconds"], result["bytes"]
    times = [_spread(seconds.get(name)) for name in (TILES, CHUNKS, TORCH)]
    gains = [_gain(seconds, name) for name in (CHUNKS, TORCH)]
    peaks = ", ".join(f"{memory[name] / 2**30:.2f}" if name in memory else "–" for name in (TILES, CHUNKS, TORCH))
    case = result["case"]
    shared = f" ({case['kv_heads']} of keys)" if case["kv_heads"] < case["heads"] else ""
    shape = f"{case['samples']} × {case['tokens']} tokens, {case['heads']} heads{shared} of {case['dim']}"
    return [case["name"], shape, *times, *gains, peaks]


def _spread(seconds: dict[str, float] | None) -> str:
    if seconds is None:
        return "–"
    return f"{seconds['median'] * 1e3:.2f} ({seconds['low'] * 1e3:.2f}–{seconds['high'] * 1e3:.2f})"


def _gain(seconds: dict[str, Any], name: str) -> str:
    return f"{seconds[name]['median'] / seconds[TILES]['median']:.2f}×" if name in seconds else "–"


def _panel(results: list[dict[str, Any]]) -> plot.Panel:
    series = {
        name: [plot.Point.of(r["case"]["name"], r["seconds"][name]) for r in results if name in r["seconds"]]
        for name in (TILES, CHUNKS, TORCH)
    }
    return plot.Panel("Attention, forward and backward", "", "seconds", series)


def page(folder: Path = RESULTS) -> str:
    data = json.loads((folder / "attention.json").read_text())
    machine = data["machine"]
    return "\n".join([
        "# Attention beyond the plain kind", "",
        f"`python benchmarks/attention.py --rounds {data['setting']['rounds']}` on one {machine['gpus'][0]} (torch "
        f"{machine['torch']}), {machine['date']}. Data: [attention.json](attention.json). Forward and backward of one "
        f"attention, in milliseconds, median with lowest and highest. {report.busy(machine)}", "",
        "`tiles` is the Triton kernel that Phalanx runs where no fused kernel of PyTorch can do a call; `chunks` plain "
        "PyTorch, a block of queries at a time, which it ran before and runs without Triton; `torch` is "
        "scaled_dot_product_attention given the same mask, bias and dropout (it has no soft cap), with keys and values "
        "repeated for all heads. Dropout of `tiles` and `chunks` is the same to the element, however work is split. "
        "GiB: what a call takes at its peak.", "",
        report.markdown(HEADERS, [row(result) for result in data["results"]]), "",
    ])  # fmt: skip


if __name__ == "__main__":
    main()
