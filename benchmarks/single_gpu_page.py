"""The page docs/results/single_gpu.md, from what `single_gpu.py` measured, and after it the remarks in
`single_gpu_notes.md`, which were written by hand about dated runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import report

from phalanx.planning.precision import peak_flops

HERE = Path(__file__).parent
RESULTS = HERE.parent / "docs" / "results"
PLAIN = ("eager", "compiled", "compiled layers")
NAMES = {
    "eager": "HuggingFace eager", "compiled": "whole model under torch.compile",
    "compiled layers": "each layer under torch.compile", "phalanx": "**Phalanx**",
    "phalanx, masters": "Phalanx as it trains by default (float32 masters, clipping)",
}  # fmt: skip
HEADERS = ["candidate", "ms per step", "tokens/s", "against the best plain one", "MFU", "peak GiB"]
KINDS = ["matrix products", "attention", "element-wise", "optimizer"]


def page(folder: Path = RESULTS) -> str:
    data = json.loads((folder / "single_gpu.json").read_text())
    found = {row["candidate"]: row for row in data["results"] if "error" not in row}
    gpu = data["machine"]["gpus"][0]
    peak = peak_flops(gpu, "bfloat16")
    assert peak is not None, f"the peak of {gpu} is not known"
    tokens = data["setting"]["batch"] * data["setting"]["tokens"]
    best = min((found[name] for name in PLAIN if name in found), key=lambda row: row["seconds"]["median"])
    rows = [[NAMES[name], *_cells(row, tokens, best, peak)] for name, row in found.items()]
    times = [[NAMES[name], *(f"{row['kernels'][kind]:.1f}" for kind in KINDS)] for name, row in found.items()]
    return "\n".join([
        "# One GPU beside plain HuggingFace", "", _setting(data), "", report.markdown(HEADERS, rows), "",
        f"MFU counts matrix products and the causal half of attention, forward and backward, against "
        f"{peak / 1e12:.0f} TFLOP/s. {_claim(found['phalanx'], best)}", "",
        "## Where the time goes (milliseconds of device time in one step)", "",
        report.markdown(["", *KINDS], times), "", (HERE / "single_gpu_notes.md").read_text(encoding="utf-8"),
    ])  # fmt: skip


def _setting(data: dict[str, Any]) -> str:
    machine, setting = data["machine"], data["setting"]
    repeats = data["results"][0]["seconds"]["repeats"]
    return (
        f"`python benchmarks/single_gpu.py --rounds {setting['rounds']}` on one {machine['gpus'][0]} (torch "
        f"{machine['torch']}, transformers {machine['transformers']}), {machine['date']}. Data: "
        f"[single_gpu.json](single_gpu.json). {setting['model'].rpartition('/')[2]}, {setting['batch']} × "
        f"{setting['tokens']} tokens per step, bfloat16 weights and AdamW state, dropout 0; candidates run in turn, "
        f"each in a process of its own; medians over {repeats} groups of 5 steps, with lowest and highest. "
        f"{report.busy(machine)}"
    )


def _cells(row: dict[str, Any], tokens: int, best: dict[str, Any], peak: float) -> list[str]:
    seconds = row["seconds"]
    return [
        f"{seconds['median'] * 1e3:.1f} ({seconds['low'] * 1e3:.1f}–{seconds['high'] * 1e3:.1f})",
        f"{tokens / seconds['median']:,.0f}", f"{best['seconds']['median'] / seconds['median']:.2f}×",
        f"{row['flops'] / seconds['median'] / peak:.1%}".replace("%", " %"), f"{row['peak_bytes'] / 2**30:.1f}",
    ]  # fmt: skip


def _claim(ours: dict[str, Any], best: dict[str, Any]) -> str:
    ratio = best["seconds"]["median"] / ours["seconds"]["median"]
    less = 1 - ours["peak_bytes"] / best["peak_bytes"]
    return (
        f"Beside the best plain variant ({NAMES[best['candidate']]}) Phalanx trains {ratio:.2f}× as fast with "
        f"{less * 100:.0f} % less memory. The goal for this setting is 1.10× with 1.20× as the aim: "
        f"**{'reached' if ratio >= 1.1 else 'not reached yet'}**."
    )
