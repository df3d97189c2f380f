"""The page docs/results/tp_shares.md, from what `tp_shares.py` counted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import report
from tp_shares import HEADERS, rows

RESULTS = Path(__file__).parent.parent / "docs" / "results"
TARGET = 0.95
INTRO = """# Tensor parallelism: how much is really split

Each architecture of the zoo at its real size, one sample of 2048 tokens or as many as the model takes, bfloat16.
Counted are the matrix products, convolutions and attentions of every rank's own graphs, so what ranks do alike counts
on each of them. With F the FLOPs of the whole model and R those of all `tp` ranks together, the share that is split is
(tp − R/F) / (tp − 1): the parallel part of Amdahl's law. A product done whole by every rank counts nothing, one that is
divided counts wholly, one that four ranks do twice counts two thirds. `busiest rank` is how much more than the mean of
all ranks the one with the most heads and columns computes. `done alike` names the weights whose products several ranks
do alike, with the reason. Target: 95 % for all decoders and encoders.
"""


def page(folder: Path = RESULTS) -> str:
    data = json.loads((folder / "tp_shares.json").read_text(encoding="utf-8"))
    machine = data["machine"]
    lines = [
        INTRO,
        f"`python benchmarks/tp_shares.py` (torch {machine['torch']}, transformers {machine['transformers']}), "
        f"{machine['date']}. Data: [tp_shares.json](tp_shares.json).",
        "",
        report.markdown(HEADERS, rows(data["results"])),
        "",
        _sentence(data["results"]),
    ]
    return "\n".join([*lines, ""])


def _sentence(results: list[dict[str, Any]]) -> str:
    least = min(results, key=lambda result: result["share"])
    models = {result["model"] for result in results}
    reached = models - {result["model"] for result in results if result["share"] < TARGET}
    return (
        f"{len(reached)} of {len(models)} architectures reach 95 %; the least is {least['share']:.1%} "
        f"({least['model']}, tp={least['tp']})."
    )
