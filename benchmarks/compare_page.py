"""The pages docs/results/data_parallel.md and pipeline_vs_torch.md, from what was measured."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import report
from compare import OURS
from compare_cli import HEADERS, rows

RESULTS = Path(__file__).parent.parent / "docs" / "results"
INTRO = {
    "data_parallel": """# Data parallel and ZeRO beside DDP and FSDP2

Phalanx, DistributedDataParallel and FSDP2 train the same HuggingFace model on the same ranks, in turn, in one job:
same weights, batch, precision, clipping to the global gradient norm and fused AdamW. DDP keeps gradients as views of
its buckets and has a static graph; FSDP2 shards each layer. Their losses are first checked to agree.
""",
    "pipeline_vs_torch": """# Pipelines beside torch.distributed.pipelining

Both train the same HuggingFace model with the same cuts, micro-batches and schedules on the same ranks, in turn, in one
job: same weights, precision, clipping to the gradient norm over all stages and fused AdamW. torch's stages were put
together by hand from the model's modules. Their losses are first checked to agree.
""",
}
READING = """
A ratio is formed within each round (who goes first changes), so that load on the machine hits both sides; shown are its
median and quartiles. *faster* and *slower* mean that both quartiles say so. `processor time` is the same ratio for the
time that processors of the host worked in all ranks and threads, which other load changes less, though it too shares
caches.
"""
THREADS = """### Whose processor time it is

NCCL has a thread for each communicator, which asks without a pause whether something came for as long as a receive is
open. Here every neighbour and direction is a communicator of its own and receives are asked for ahead, so that messages
come beneath computation; torch's pipelines have one communicator and ask for each message when they need it. All other
threads together take less time than theirs. NCCL can share one such thread among communicators, but then starts their
kernels one after the other, by its sources, so that a receive would hold up what is sent behind it; that was not tried.
Of the other two schedules this was not measured: the run was cut off.
"""
REMARKS = {
    "pipeline_vs_torch": """
## What ours did that theirs did not, on CPU ranks

The table of CPU ranks is from after the following; before it, quiet ranks had 0.96–1.00× by processor time. Operator by
operator (one step of `pp=2,mb=4,schedule=1f1b`, llama, the first rank's thread: 614 ms ours, 589 ms theirs), products,
element-wise operators and messages took alike. What did not:

- Attention repeated keys and values of grouped heads and went through torch's wrapper of custom operators: 96 ms of a
  step, theirs 82 ms. Predicted: 14 ms less. Now 0.6 ms apart from theirs; by processor
  time 0.977× → 0.983×.
- Some 2,100 operators a step were looked up by name and called through a Python frame each: 7.5 % of samples lay in
  Python and its bindings, theirs 3.2 %. Predicted: 4 µs each, 8 ms less. Now they are found once: 612 → 596 ms; by
  processor time 0.983× → 0.999× (quartiles 0.996–1.011).
- Rotary tables, which follow from shapes, were computed for every micro-batch, as theirs are. Predicted: 1 ms less.
  They are made once now; that was not measured by itself.

These were measured in turn, with three to six processes ready to run on the two cores: steady to about 1 %.
"""
}


def page(name: str, folder: Path = RESULTS) -> str:
    """The whole page, from the result files that there are."""
    files = [folder / f"{name}{suffix}.json" for suffix in ("_gpu", "")]
    sections = [_section(name, json.loads(file.read_text()), file.name) for file in files if file.exists()]
    threads = folder / f"{name}_gpu_threads.json"
    if threads.exists():
        sections.insert(1, _threads(json.loads(threads.read_text()), threads.name))
    return "\n".join([INTRO[name] + READING, *sections]) + REMARKS.get(name, "")


def _section(name: str, data: dict[str, Any], file: str) -> str:
    machine, setting = data["machine"], data["setting"]
    size, on_gpu = setting["size"], bool(machine["gpus"])
    where = f"ranks that share one {machine['gpus'][0]}" if on_gpu else "CPU ranks with one thread each"
    command = f"python benchmarks/{name}.py{' --gpu' if on_gpu else ''}{' --quick' if setting['quick'] else ''}"
    precision = setting["dtype"] + (", float32 weights beside it" if on_gpu and setting["masters"] else "")
    lines = [
        f"## {'GPU' if on_gpu else 'CPU'} ranks", "",
        f"`{command} --rounds {setting['rounds']}` on {where}, torch {machine['torch']}, {machine['date']}. "
        f"Data: [{file}]({file}). {size['layers']} layers of width {size['width']}, vocabulary {size['vocabulary']}, "
        f"{size['samples']} × {size['tokens']} tokens per step, {precision}.", "",
        report.markdown(HEADERS, rows(data["results"])), "",
        f"{_count(data['results'])} {report.busy({**setting, **machine})}", "",
    ]  # fmt: skip
    return "\n".join(lines)


def _threads(data: dict[str, Any], file: str) -> str:
    """Whose the processor time is, in milliseconds a step over all ranks."""
    found: list[list[str]] = []
    for result in data["results"]:
        (rival,) = result["ratios"]
        both, polled = result["processor_seconds"], result["nccl_seconds"]
        total, nccl = ([1e3 * side[name]["median"] for name in (OURS, rival)] for side in (both, polled))
        rest = [whole - own for whole, own in zip(total, nccl, strict=True)]
        shown = [f"{number:.0f}" for number in (nccl[0], rest[0], nccl[1], rest[1])]
        found.append([result["plan"], *shown, f"{rest[1] / rest[0]:.2f}×"])
    headers = ["plan", "ours: NCCL's threads ms", "all others ms", "theirs: NCCL's threads ms", "all others ms",
               "theirs / ours of all others"]  # fmt: skip
    return THREADS + f"\n{data['machine']['date']}, data: [{file}]({file}).\n\n{report.markdown(headers, found)}\n"


def _count(results: Sequence[dict[str, Any]]) -> str:
    found = Counter(row[-1] for row in rows([result for result in results if "error" not in result]))
    failed = sum("error" in result for result in results)
    text = ", ".join(f"{found[word]} {word}" for word in ("faster", "even", "slower"))
    return f"Of {sum(found.values())} comparisons: {text}." + (f" {failed} could not be made." if failed else "")
