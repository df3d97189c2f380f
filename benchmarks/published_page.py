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

{odd}Two things were chosen with all of vTrain's runs in sight: how sharply a device passes from waiting for its host to
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
ODD = """{name}: steps grow by the same time with every layer, and a layer of one width, `tp` and number of samples
takes the same in all of them. Of these {of} times, some lie far below their neighbours (under three quarters of what
half and twice the samples take, in the geometric mean), which no formula of sizes tells:

{layers}

The best plan of {best} of the {sweeps} sweeps has such a layer. There *top 1* is {with_1} and *top 3* {with_3}, in the
others {without_1} and {without_3} (where ranks meet, with n = {exponent:g}): {part} of *top 1* comes from these sweeps.
Of all sweeps without the runs that have such a layer, it is {left_1}, and *top 3* {left_3}.

"""
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
        REST.format(odd="".join(_odd(row) for row in data["results"] if "odd_layers" in row)),
        "## What is left out",
        "",
        report.markdown(["rows", "why"], [[str(count), reason] for reason, count in left_out.items()]),
        "",
        f"Measured figures: [published.json](published.json), {data['machine']['date']}.",
    ]
    return "\n".join(lines) + "\n"


def _odd(row: dict[str, Any]) -> str:
    """What layers with odd times have to do with what choosing costs."""
    odd, sweeps = row["odd_layers"], row["sweeps"]

    def text(part: str, count: int) -> str:
        value = odd[part][f"top_{count}_regret"]
        return "nothing" if value is None else f"{value:.1%}".replace("%", " %")

    layers = report.markdown(
        ["width", "ranks", "samples", "a layer takes", "of what its neighbours say"],
        [
            [*(str(own[name]) for name in ("width", "tp", "samples")), f"{1e3 * own['seconds']:.1f} ms",
             f"{own['share']:.0%}".replace("%", " %")]
            for own in odd["layers"]
        ],
    )  # fmt: skip
    theirs = (odd["with"]["top_1_regret"] or 0.0) * odd["best"] / sweeps
    part = f"{theirs / row['top_1_regret']:.0%}".replace("%", " %") if row["top_1_regret"] else "nothing"
    return ODD.format(
        name=_name(row), of=odd["of"], exponent=odd["exponent"], layers=layers, best=odd["best"], sweeps=sweeps,
        with_1=text("with", 1), with_3=text("with", 3), without_1=text("without", 1), without_3=text("without", 3),
        left_1=text("left_out", 1), left_3=text("left_out", 3), part=part,
    )  # fmt: skip


def _name(row: dict[str, Any]) -> str:
    publisher, comma, rest = row["group"].partition(",")
    return f"{NAMES.get(publisher, publisher)}{comma}{rest}, {row['device']}"


def _cells(row: dict[str, Any]) -> list[str]:
    def text(name: str, form: str) -> str:
        return format(row[name], form).replace("%", " %") if row[name] is not None else ""

    memory = f"{text('memory_right', '.1%')} of {row['memory_runs']}" if row["memory_runs"] else ""
    shares = [text(name, ".1%") for name in ("top_1_regret", "top_3_regret")]
    return [
        _name(row), str(row["runs"]), text("error", ".1%"), text("rank_correlation", ".2f"), *shares, memory
    ]  # fmt: skip


if __name__ == "__main__":
    print(page())
