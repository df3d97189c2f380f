"""The page docs/results/memory.md, from what `memory.py` measured and predicted."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import memory
import report

RESULTS = Path(__file__).parent.parent / "docs" / "results"
AGAIN = (
    "The predictions were made anew afterwards (`--again`): what a compiler does beside a product, such as factors "
    "that it pads and results that it writes over what is not read again, was learnt from these very runs. So they "
    "show how well it is described, not how well it would be guessed. What BERT needed was kept with two decimals. "
)
INTRO = (
    "One rank, AdamW; what a step holds at most is predicted before anything lies on the device, and compared with "
    "what the allocator counted. "
)
BELOW = (
    "On host: what the plan keeps in main memory, predicted. Rows with so many layers are those of "
    "[largest.md](largest.md). "
)


def page(folder: Path = RESULTS) -> str:
    data = json.loads((folder / "memory.json").read_text())
    machine, results = data["setting"].get("measured_on", data["machine"]), data["results"]
    return "\n".join([
        "# Peak memory, predicted and measured", "",
        f"`python benchmarks/memory.py` on one {machine['gpus'][0]} (torch {machine['torch']}, transformers "
        f"{machine['transformers']}), {machine['date']}. Data: [memory.json](memory.json). {INTRO}"
        f"{AGAIN if 'measured_on' in data['setting'] else ''}", "", f"**{memory.summary(results)}.**", "",
        report.markdown(memory.HEADERS, [memory.row(result) for result in results]), "", BELOW + _gain(results), "",
        *(line for file in sorted(folder.glob("memory_*.json")) for line in _long(file)),
    ])  # fmt: skip


def _long(file: Path) -> list[str]:
    """What rungs cost for one long sample."""
    data = json.loads(file.read_text())
    machine, own, results = data["machine"], data["setting"], [r for r in data["results"] if "error" not in r]
    block = next(statistics.median(r["seconds"]) for r in results if r["plan"].endswith("recompute=block"))
    rows = [[*memory.row(r)[3:-1], f"{block / statistics.median(r['seconds']):.2f}×"] for r in results]
    plans = " ".join(own["plans"])
    return [
        f"## {own['models'][0]}, one sample of {own['tokens']:,} tokens", "",
        f"`python benchmarks/memory.py --models {own['models'][0]} --batch {own['batch']} --tokens {own['tokens']} "
        f"--fields {' '.join(own['fields'])} --precisions {own['precisions'][0]} --plans {plans}` on one "
        f"{machine['gpus'][0]}, {machine['date']}. Data: [{file.name}]({file.name}).", "",
        report.markdown([*memory.HEADERS[3:-1], "as fast as whole blocks"], rows), "",
        *(line for note in data.get("notes", ()) for line in (note, "")),
    ]  # fmt: skip


def _gain(results: list[dict[str, Any]]) -> str:
    """What keeping more brings where it fits."""
    seconds = {
        r["plan"]: statistics.median(r["seconds"])
        for r in results
        if r["setting"]["model"] == memory.LARGE and r["precision"] == "bfloat16"
    }
    slowest, fastest = max(seconds, key=seconds.__getitem__), min(seconds, key=seconds.__getitem__)
    return (
        f"In bfloat16 alone, `{fastest}` is {seconds[slowest] / seconds[fastest]:.2f}× as fast as `{slowest}`: "
        "nothing forces whole blocks to be computed again there."
    )
