"""One form for every benchmark's result: a table for people, JSON with machine and versions for everything else.

Runs of the candidates are interleaved (A B C A B C …) so that drift of the machine hits all alike; a figure is the
median over all repeats with its spread (lowest and highest).
"""

from __future__ import annotations

import json
import platform
import statistics
import time
from pathlib import Path
from typing import Any


def machine() -> dict[str, Any]:
    import torch
    import transformers

    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "date": time.strftime("%Y-%m-%d"), "python": platform.python_version(), "torch": torch.__version__,
        "transformers": transformers.__version__, "processor": platform.machine(), "gpus": gpus,
    }  # fmt: skip


def summary(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "low": min(values), "high": max(values), "repeats": len(values)}


def table(headers: list[str], rows: list[list[str]]) -> str:
    widths = [max(len(row[i]) for row in [headers, *rows]) for i in range(len(headers))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in [headers, *rows]]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def write(path: Path, name: str, setting: dict[str, Any], results: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        json.dumps({"benchmark": name, "machine": machine(), "setting": setting, "results": results}, indent=1)
    )
