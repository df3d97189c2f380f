"""The page docs/results/published.md, from what `published.py` judged. It shows figures of each publisher, no rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import report

RESULTS = Path(__file__).parent.parent / "docs" / "results"
ASKED = "vTrain, one node 5 % and several 8 %, Aleph-Alpha 5 %; top 1 3 %, top 3 1 %; memory 95 %"
INTRO = """# Steps that others measured, predicted

Published runs, as `phalanx/planning/runs.py` reads them. The models of each publisher are halved: what software
reaches of a device is fitted to one half and judged on the other, both ways, so that no shape is on both sides; the few
numbers that are fitted belong to devices and programs, never to a model. With few runs of a publisher, the fit begins
with what that half of all runs on the device says; where there are none, with what is assumed of any device. Nothing
was run here.

*error*: mean of |predicted / measured − 1| of step times. *rank*: Spearman's correlation within sweeps, which are five
runs or more of one model, batch and cluster. *top 1*, *top 3*: how much slower than the best that was measured the plan
predicted best is, and the best of three. *memory*: of runs and failures, those that were told rightly to fit or not to.
"""
REST = """## What is left of the errors

vTrain's steps on one node grow by the same time with every layer, and a layer of one width, `tp` and number of samples
takes the same in all of them. Of these 32 times, two lie far below their neighbours: a layer of width 1024 over two
ranks takes less for four samples than for two, and one of width 2048 over four ranks less for two than for one. No
formula of sizes tells that. One of the two is in the best plan of 27 of the 72 sweeps, and much of *top 1* and
*top 3* there is theirs.

Two things were chosen with all of vTrain's runs in sight: how sharply a device passes from waiting for its host to
computing, and that softmax which is not fused starts as many kernels again as a unit. What is fitted is fitted to the
other half alone.

A publisher with few models, or whose halves are of different kinds (zero-bubble on several nodes, Sailor, torchtitan,
Korthikanti), says little about itself; AMP's T4 and Megatron-Bridge's B200 are judged with what is assumed of any
device. NeMo and Megatron-Bridge compute in 8 bits, which is taken to halve the time of a layer's products and nothing
else.
"""
NAMES = {
    "Aleph-Alpha/NeurIPS-WANT-submission-efficient-parallelization-layouts": "Aleph-Alpha",
    "DachengLi1/AMP": "AMP",
    "NVIDIA-NeMo/Megatron-Bridge": "Megatron-Bridge",
    "NVIDIA/NeMo": "NeMo",
    "Narayanan": "SC'21 Megatron-LM",
    "VIA-Research/vTrain": "vTrain",
    "Zero": "zero-bubble",
    "eth-easl/sailor": "Sailor",
    "mosaicml/llm-foundry": "llm-foundry",
    "pytorch/torchtitan": "torchtitan",
}
HEADERS = ["", "runs", "error", "rank", "top 1", "top 3", "memory"]


def page(folder: Path = RESULTS) -> str:
    data = json.loads((folder / "published.json").read_text(encoding="utf-8"))
    setting = data["setting"]
    left_out = setting["left_out"]
    lines = [
        INTRO,
        f"Of {setting['runs'] + sum(left_out.values()):,} rows, {setting['runs']:,} say enough. Asked: {ASKED}.",
        "",
        report.markdown(HEADERS, [_cells(row) for row in data["results"]]),
        "",
        REST,
        "## What is left out",
        "",
        report.markdown(["rows", "why"], [[str(count), reason] for reason, count in left_out.items()]),
        "",
        f"Measured figures: [published.json](published.json), {data['machine']['date']}.",
    ]
    return "\n".join(lines) + "\n"


def _cells(row: dict[str, Any]) -> list[str]:
    def text(name: str, form: str) -> str:
        return format(row[name], form).replace("%", " %") if row[name] is not None else ""

    memory = f"{text('memory_right', '.1%')} of {row['memory_runs']}" if row["memory_runs"] else ""
    shares = [text(name, ".1%") for name in ("top_1_regret", "top_3_regret")]
    publisher, comma, rest = row["group"].partition(",")
    cells = [str(row["runs"]), text("error", ".1%"), text("rank_correlation", ".2f"), *shares, memory]
    return [f"{NAMES.get(publisher, publisher)}{comma}{rest}, {row['device']}", *cells]


if __name__ == "__main__":
    print(page())
