"""Runs that somebody measured, from a table: which model on which devices under which plan, and how long a step took.

Columns are those of the header below; what a row leaves empty is unknown. Kernels, sequence parallelism, schedule and
virtual stages are read from its notes. A row that says too little, or is about something that plans do not have
(expert or context parallelism, adapters, 4-bit products), is left out and counted with its reason.
"""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from phalanx.errors import DataError, PhalanxError
from phalanx.plan.plan import Plan
from phalanx.planning.cluster import Cluster, Nodes
from phalanx.planning.devices import Device, find
from phalanx.planning.estimate import Load, loads_of
from phalanx.planning.work import ModelWork, Shape, transformer

COLUMNS = ("source", "model", "layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "seq_len", "gpu", "n_gpus",
           "gpus_per_node", "interconnect", "tp", "pp", "cp", "dp", "zero_stage", "micro_batch", "global_batch",
           "recompute", "dtype", "measured_tokens_per_s", "measured_iter_s", "notes")  # fmt: skip
VOCABULARY = 50257  # GPT-2's, where a row does not say it
FUSED_HEADS = 4  # of all samples of a micro-batch, which Megatron's fused softmax takes at a time
_RUNGS = {"full": "block", "none": "none", "": "none", "selective": "light", "selective-op": "light", "none+SP": "none",
          "selective+SP": "light"}  # fmt: skip
_SCHEDULES = {"1F1B": "1f1b", "ZB-1p": "zb-h1", "ZB-H1": "zb-h1", "1F1B-I": "interleaved"}


@dataclass(frozen=True)
class Run:
    """seconds: of a step; None where it ran out of memory. bits: of what a layer's products multiply."""

    source: str
    model: str
    device: str
    work: ModelWork
    plan: Plan
    cluster: Cluster
    batch: int
    seconds: float | None
    bits: int = 16

    @cached_property
    def loads(self) -> list[Load]:
        return loads_of(self.work, self.plan)


class _Skip(Exception):
    """Why a row is left out."""


def read_runs(path: Path) -> tuple[list[Run], Counter[str]]:
    """The runs of a file, and how many rows were left out for which reason."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            missing = [name for name in COLUMNS if name not in (reader.fieldnames or ())]
            if missing:
                message = f"runs: {path} has no column {missing[0]!r}"
                raise DataError(message, f"give a CSV file with the columns {', '.join(COLUMNS)}")
            rows = list(reader)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"runs: {path} cannot be read: {error}", "give a CSV file of measured runs") from error
    runs: list[Run] = []
    left_out: Counter[str] = Counter()
    for row in rows:
        if None in row.values():
            left_out["too few columns"] += 1
            continue
        try:
            runs.append(read_run(row))
        except _Skip as skip:
            left_out[str(skip)] += 1
    return runs, left_out


def read_run(row: Mapping[str, str]) -> Run:
    notes = row["notes"]
    if row["cp"] not in ("", "1") or re.search(r"EP=(?!1\b)\d", notes):
        raise _Skip("context or expert parallelism")
    bits = _bits(row["dtype"].lower())
    if "LoRA" in notes:
        raise _Skip("adapters of which more is not known")
    if ("TeraPipe" in notes and "w/o" not in notes) or "token slices" in notes:
        raise _Skip("token slices")
    batch = _number(row, "global_batch")
    seconds = _seconds(row, batch)
    tp, pp, dp = (_number(row, name) for name in ("tp", "pp", "dp"))
    if tp * pp * dp != _number(row, "n_gpus"):
        raise _Skip("a mesh that is not that of its devices")
    cluster = _cluster(row)
    work = transformer(row["model"], _shape(row))
    work = _in_eight_bits(work) if bits == 8 else work
    try:
        plan = _plan(row, work, tp, pp, dp, batch)
    except PhalanxError as error:
        raise _Skip("a plan that there is not") from error
    return Run(row["source"], row["model"], cluster.nodes[0].device.name, work, plan, cluster, batch, seconds, bits)


def _bits(dtype: str) -> int:
    if dtype in ("", "bf16", "fp16", "amp_bf16"):
        return 16
    if "fp8" in dtype:
        return 8
    raise _Skip("products in other than 16 or 8 bits")


def _in_eight_bits(work: ModelWork) -> ModelWork:
    """Tensor cores take half as long; the head's products and attention stay as they are."""
    halved = (replace(own, products=own.products / 2) if own.is_layer else own for own in work.classes)
    return replace(work, classes=tuple(halved))


def _number(row: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = row[name].strip()
    if not text.isdigit() and default is not None:
        return default
    if not text.isdigit() or int(text) < 1:
        raise _Skip(f"no {name}")
    return int(text)


def _seconds(row: Mapping[str, str], batch: int) -> float | None:
    if row["notes"].startswith("OOM"):
        return None
    if row["measured_iter_s"]:
        return _measured(row, "measured_iter_s")
    if row["measured_tokens_per_s"]:
        return batch * _number(row, "seq_len") / _measured(row, "measured_tokens_per_s")
    if row.get("measured_tflops_per_gpu") and "96 B s l h^2" in row["notes"]:
        return _seconds_of_rate(row, batch)
    raise _Skip("no measured time")


def _measured(row: Mapping[str, str], name: str) -> float:
    """One that is not above 0, or no number, would decide the fit of all others."""
    try:
        found = float(row[name])
    except ValueError:
        found = 0.0
    if not 0 < found < float("inf"):
        raise _Skip(f"a {name} that is no number above 0")
    return found


def _seconds_of_rate(row: Mapping[str, str], batch: int) -> float:
    """From FLOP/s as some count them: 96 B s l h² (1 + s / 6h + V / 16lh), all computed again once."""
    layers, hidden, tokens = (_number(row, name) for name in ("layers", "hidden", "seq_len"))
    vocabulary = _number(row, "vocab", default=VOCABULARY)
    flops = 96.0 * batch * tokens * layers * hidden**2
    flops *= 1 + tokens / (6 * hidden) + vocabulary / (16 * layers * hidden)
    return flops / (_measured(row, "measured_tflops_per_gpu") * 1e12 * _number(row, "n_gpus"))


def _cluster(row: Mapping[str, str]) -> Cluster:
    name = re.sub(r"\s*\(.*", "", row["gpu"])
    device = _device(name)
    total = _number(row, "n_gpus")
    devices = min(total, _number(row, "gpus_per_node", default=device.per_node))
    if total % devices:
        raise _Skip("nodes that are not full")
    network = _network(row["interconnect"], devices) or device.network.value
    kind = Nodes(total // devices, devices, device, device.link.value, network, device.memory.value)
    return Cluster((kind,))


def _device(name: str) -> Device:
    try:
        return find(name)
    except PhalanxError:
        raise _Skip(f"a device that is not known ({name})") from None


def _network(text: str, devices: int) -> float | None:
    """Bytes/s of a node, where a row says it."""
    match = re.search(r"(?:(\d+)x)?(\d+) ?Gbp?s?(/GPU)?", text)
    if match is None:
        return None
    per = int(match[1] or 1) * int(match[2]) / 8 * 1e9
    return per * devices if match[3] else per


def _shape(row: Mapping[str, str]) -> Shape:
    notes, name = row["notes"], row["model"].lower()
    hidden, heads = _number(row, "hidden"), _number(row, "heads")
    gated = any(word in name for word in ("llama", "mistral", "qwen", "internlm"))
    kernel = re.search(r"kernel=([^;]*)", notes)
    named = kernel[1].strip() if kernel else ""
    attention = {"torch": "unfused", "fused": "fused"}.get(named, "flash1" if "v1" in named else "flash")
    if kernel is None and "Megatron-DeepSpeed" in notes:
        attention = "fused"  # as that program computed it before flash attention
    if attention == "fused" and heads * _number(row, "micro_batch") // _number(row, "tp") % FUSED_HEADS:
        attention = "unfused"
    fused_norms = "RMS kernel" in notes if kernel else True
    return Shape(
        _number(row, "layers"), hidden, heads, _number(row, "kv_heads", default=heads),
        _number(row, "ffn", default=4 * hidden), _number(row, "vocab", default=VOCABULARY), _number(row, "seq_len"),
        gated, attention, fused_norms, dropout=not gated, tied=not gated,
    )  # fmt: skip


def _plan(row: Mapping[str, str], work: ModelWork, tp: int, pp: int, dp: int, batch: int) -> Plan:
    notes = row["notes"]
    samples = _number(row, "micro_batch")
    if batch % (dp * samples):
        raise _Skip("a batch that its micro-batches do not divide")
    if row["recompute"] not in _RUNGS:
        raise _Skip("another recomputation")
    zero = int(row["zero_stage"] or 0) if dp > 1 else 0
    says = "sequence parallelism" in notes and "no sequence" not in notes
    sequence = tp > 1 and (says or "sequence_parallel=1" in notes)
    virtual = re.search(r"VP=(\d+)", notes)
    v = int(virtual[1]) if virtual and int(virtual[1]) > 1 and pp > 1 else 1
    named = re.search(r"schedule=([\w-]+)", notes)
    if named and named[1] not in _SCHEDULES:
        raise _Skip("a schedule that there is not")
    schedule = _SCHEDULES[named[1]] if named and pp > 1 else "interleaved" if v > 1 else "1f1b"
    v = max(v, 2) if schedule == "interleaved" else 1
    # Those programs give every stage as many layers, and embedding and head to the first and the last.
    layers, left = divmod(len(work.layers), pp * v)
    counts = [layers + (stage >= pp * v - left) for stage in range(pp * v)]
    counts[0] += 1
    counts[-1] += 1  # the same one where there is no pipeline
    return Plan(
        pp=pp, tp=tp, dp=dp, mb=batch // (dp * samples), schedule=schedule, v=v, zero=zero, sequence=sequence,
        recompute=(_RUNGS[row["recompute"]],) * len(work.layers), stages=tuple(counts),  # never of the head
    )  # fmt: skip
