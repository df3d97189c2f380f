"""How fast checkpoints reach the disk, beside plain writes of as many bytes, and how long training stands still.

    python benchmarks/checkpoints.py [--gpu] [--sizes 0.25 1] [--repeats 5] [--folder DIR] [--out checkpoints.json]

A state like that of Adam (three tensors per parameter, the largest a sixth of it) is saved as training saves it, in the
background. *Stall* is how long the caller waits: for the first checkpoint in memory that was made ahead (on a GPU) or
not (on a CPU), for later ones in memory that was used before. *Plain* is one file, or four at once, written from memory
and followed by fsync, by threads that do nothing else. All of it in turn, every repeat anew.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import plot
import report
import torch
from torch import Tensor

from phalanx.observe.format import bytes_text
from phalanx.state.background import AsyncSaver

RESULTS = Path(__file__).parent.parent / "docs" / "results"
SIZES = {False: (0.0625, 0.25, 1.0), True: (1.0, 5.0, 15.0)}  # GB, without and with a GPU
NUM_LAYERS, WRITERS = 16, 4
WANTED = 0.8  # of the plain rate
HEADERS = ["state", "plain MB/s", "four plain MB/s", "checkpoint MB/s", "of plain", "of four plain", "read back s",
           "first stall s", "stall s"]  # fmt: skip
INTRO = f"""# Checkpoints

How fast checkpoints reach the disk, beside plain writes of as many bytes followed by fsync, and how long training
stands still for one. Checksums are computed on the way. At least {WANTED:.0%} of the plain rate is what was asked for,
and a stall of at most 1.5 s for 15 GB from a GPU. *Read back* is what verifying takes before an older checkpoint is
deleted, behind training as well."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = report.options(__doc__ or "")
    parser.add_argument("--gpu", action="store_true", help="the state lies on a GPU")
    parser.add_argument("--sizes", type=float, nargs="+", metavar="GB", help="of the state")
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="the median counts")
    parser.add_argument("--folder", type=Path, help="on the disk that is measured (default: the temporary folder)")
    options = parser.parse_args(arguments)
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for size in options.sizes or SIZES[options.gpu]:
            results.append(measured(Path(folder), int(size * 1e9), options.repeats, "cuda" if options.gpu else "cpu"))
            print(report.table(HEADERS, [row(results[-1])]), file=sys.stderr)
    print(report.table(HEADERS, [row(result) for result in results]))
    setting = {"device": "cuda" if options.gpu else "cpu", "repeats": options.repeats, "writers": WRITERS}
    report.publish(options, "checkpoints", setting, results, panels(results))


def measured(folder: Path, num_bytes: int, repeats: int, device: str) -> dict[str, Any]:
    state = state_of(num_bytes, device)
    num_bytes = sum(tensor.nbytes for _, tensor in state)
    source = torch.ones(num_bytes, dtype=torch.uint8).numpy().data
    saver = AsyncSaver(folder / "checkpoints", keep=1)
    if device != "cpu":
        saver.prepare(state)
        saver.wait()
    found: dict[str, list[float]] = {name: [] for name in ("plain", "four_plain", "checkpoint", "stall")}
    for step in range(1, repeats + 1):
        found["plain"].append(plain(folder, source, 1))
        found["four_plain"].append(plain(folder, source, WRITERS))
        write, stall = saved(saver, state, step)
        found["checkpoint"].append(write)
        found["stall"].append(stall)
        shutil.rmtree(folder / "checkpoints")
    saved(saver, state, 1)
    verified, _ = saved(saver, state, 2)  # and deletes the first
    shutil.rmtree(folder / "checkpoints")
    rest = found["stall"][1:] or found["stall"]
    return {
        "bytes": num_bytes, "first_stall": found["stall"][0], "with_read_back": verified,
        **{name: report.summary(seconds) for name, seconds in {**found, "stall": rest}.items()},
    }  # fmt: skip


def state_of(num_bytes: int, device: str) -> list[tuple[str, Tensor]]:
    """Weights and two moments of layers, and of an embedding that is a sixth of the whole."""
    elements = num_bytes // 12
    sizes = {"embedding": elements // 6, **{f"layer{i}": elements * 5 // 6 // NUM_LAYERS for i in range(NUM_LAYERS)}}
    slots = ("master", "optimizer/exp_avg", "optimizer/exp_avg_sq")
    return [(f"{slot}/{name}", torch.randn(size, device=device)) for slot in slots for name, size in sizes.items()]


def plain(folder: Path, data: memoryview, writers: int) -> float:
    """Seconds to write so many files at once, together with all of the data, and to have them on the disk."""

    def write(number: int) -> None:
        part = -(-len(data) // writers)
        with (folder / f"plain-{number}").open("wb", buffering=0) as file:
            rest = data[number * part : (number + 1) * part]
            while rest:
                rest = rest[file.write(rest[: 64 << 20]) :]
            os.fsync(file.fileno())

    began = time.perf_counter()
    with ThreadPoolExecutor(writers) as pool:
        list(pool.map(write, range(writers)))
    seconds = time.perf_counter() - began
    for path in folder.glob("plain-*"):
        path.unlink()
    return seconds


def saved(saver: AsyncSaver, state: list[tuple[str, Tensor]], step: int) -> tuple[float, float]:
    """Seconds from the call until it is complete on the disk, and those in which the caller waited."""
    if state[0][1].is_cuda:
        torch.cuda.synchronize()
    began = time.perf_counter()
    saver.save(step, state, {"step": step})
    stall = time.perf_counter() - began
    assert saver.wait() is not None and saver.take_refusal() is None
    return time.perf_counter() - began, stall


def row(result: Mapping[str, Any]) -> list[str]:
    plainly, four, own = (result[name]["median"] for name in ("plain", "four_plain", "checkpoint"))
    rates = [f"{result['bytes'] / seconds / 1e6:,.0f}" for seconds in (plainly, four, own)]
    read_back = max(0.0, result["with_read_back"] - own)
    stalls = [f"{result['first_stall']:.3f}", f"{result['stall']['median']:.3f}"]
    return [
        bytes_text(result["bytes"]),
        *rates,
        *(f"{seconds / own:.0%}" for seconds in (plainly, four)),
        f"{read_back:.2f}",
        *stalls,
    ]


def panels(results: Sequence[Mapping[str, Any]]) -> list[plot.Panel]:
    names = {"plain": "plain", "four plain": "four_plain", "checkpoint": "checkpoint", "stall": "stall"}
    series = {name: [plot.Point.of(each["bytes"] / 1e9, each[key]) for each in results] for name, key in names.items()}
    return [plot.Panel("checkpoints", "GB of state", "seconds", series)]


def page(folder: Path = RESULTS) -> str:
    lines = [INTRO]
    for file in sorted(folder.glob("checkpoints*.json")):
        data = json.loads(file.read_text(encoding="utf-8"))
        machine, setting = data["machine"], data["setting"]
        device = machine["gpus"][0] if setting["device"] == "cuda" else "CPU"
        lines += [
            "",
            f"## State on {device}",
            "",
            f"`python benchmarks/checkpoints.py` (torch {machine['torch']}), {machine['date']}, median of "
            f"{setting['repeats']}. {report.busy(machine)} Data: [{file.name}]({file.name}).",
            "",
            report.markdown(HEADERS, [row(result) for result in data["results"]]),
        ]
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    main()
