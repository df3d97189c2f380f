"""The published TeraPipe runs, and a model of a stage on their cluster that is calibrated on some of them.

What a slice takes has three forms here, because the right one was not known beforehand: the page shows all of them.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from phalanx.planning.slice_search import Times
from phalanx.predict.costs import Link

GRAIN = 8  # tokens, as published
PLANNED = 0  # stands for the slicing that a planner chose
COARSE, FINE = 4, 128  # uniform slicings used for calibration
NODE_LINK = Link(bytes_per_s=25e9 / 8)  # 25 Gbit/s per node
GPUS_PER_NODE = 8
ELEMENT_BYTES = 2  # fp16
SLICING = re.compile(r"(?P<without>w/o TeraPipe)|(?P<planned>w/ TeraPipe|token slices=DP)|token slices=(?P<number>\d+)")


@dataclass(frozen=True)
class Setting:
    """samples: of one pipeline. Each is a micro-batch of its own, as published."""

    model: str
    layers: int
    hidden: int
    heads: int
    tokens: int
    tp: int
    pp: int
    dp: int
    samples: int

    @property
    def stage_layers(self) -> int:
        return self.layers // self.pp

    @property
    def flops_per_token(self) -> float:
        """Of one stage on one GPU, forward and backward, without attention's products of tokens with tokens."""
        return self.stage_layers * 3 * 24 * self.hidden**2 / self.tp

    @property
    def heads_per_gpu(self) -> float:
        return self.stage_layers * self.heads / self.tp

    @property
    def message_per_token(self) -> float:
        """Seconds for an activation and its gradient. Ranks are placed tensor-parallel first, then by stages, so only
        some neighbours are on different nodes; what stays inside a node is taken as free."""
        crossing = min(1.0, self.tp / GPUS_PER_NODE)
        return crossing * 2 * NODE_LINK.send(self.hidden * ELEMENT_BYTES)

    @property
    def reduction(self) -> float:
        """Seconds to reduce gradients over replicas; all GPUs of a node share its link."""
        parameters = self.stage_layers * 12 * self.hidden**2 / self.tp
        own = Link(bytes_per_s=NODE_LINK.bytes_per_s / GPUS_PER_NODE)
        return own.reduce(parameters * ELEMENT_BYTES, self.dp)


@dataclass(frozen=True)
class Run:
    """slicing: the number of uniform slices, or PLANNED."""

    setting: Setting
    slicing: int
    seconds: float

    @property
    def calibrates(self) -> bool:
        return self.setting.dp == 1 and self.slicing in (1, COARSE, FINE)


@dataclass(frozen=True)
class Form:
    """Of the time of a slice. start: something is added to every slice. hidden: starting the work of a short slice
    takes so long that its message is sent meanwhile; otherwise the message comes after."""

    name: str
    start: bool
    hidden: bool


FORMS = (
    Form("start + max(floor, work + message)", True, True),
    Form("start + max(floor, work) + message", True, False),
    Form("max(floor, work) + message", False, False),
)


@dataclass(frozen=True)
class Device:
    """Seconds; floor: what starting the work of one layer takes at least, forward and backward."""

    form: Form
    per_flop: float
    per_pair: float
    start: float
    floor: float

    def times(self, setting: Setting) -> Times:
        """Attention is computed for the whole rectangle of a slice and all it sees, then masked, as in the original."""
        past = GRAIN * np.arange(setting.tokens // GRAIN)
        tokens = GRAIN * np.arange(setting.tokens // GRAIN + 1)[:, None]
        pairs = setting.heads_per_gpu * tokens * (past + tokens)
        work = self.per_flop * setting.flops_per_token * tokens + self.per_pair * pairs
        message, floor = setting.message_per_token * tokens, self.floor * setting.stage_layers
        if self.form.hidden:
            seconds = np.maximum(floor, work + message)
        else:
            seconds = np.maximum(floor, work) + message
        return np.where(tokens + past <= setting.tokens, self.start + seconds, np.inf)


def read(path: Path) -> list[Run]:
    """The TeraPipe rows."""
    with path.open(encoding="utf-8", newline="") as file:
        return [_run(row) for row in csv.DictReader(file) if "terapipe" in row["source"].lower()]


def _run(row: dict[str, str]) -> Run:
    found = SLICING.search(row["notes"])
    assert found, f"no slicing in {row['notes']!r}"
    slicing = 1 if found["without"] else PLANNED if found["planned"] else int(found["number"])
    layers, hidden, heads, tokens, tp, pp, dp, batch = (
        int(row[name]) for name in ("layers", "hidden", "heads", "seq_len", "tp", "pp", "dp", "global_batch")
    )
    setting = Setting(row["model"], layers, hidden, heads, tokens, tp, pp, dp, batch // dp)
    return Run(setting, slicing, float(row["measured_iter_s"]))


def calibrate(runs: Iterable[Run], form: Form) -> Device:
    """Least squares of relative errors over the runs that calibrate.

    Slices of the finest slicing are taken to be on the floor and all others above it, so the problem is linear.
    """
    used = [run for run in runs if run.calibrates]
    columns = np.array([_column(run) for run in used]) / np.array([[run.seconds] for run in used])
    if not form.start:
        columns = np.delete(columns, 2, axis=1)
    known = [_messages(run) if run.slicing != FINE or not form.hidden else 0.0 for run in used]
    target = np.array([1 - message / run.seconds for run, message in zip(used, known)])
    scale = np.abs(columns).max(axis=0)
    found = (np.linalg.lstsq(columns / scale, target, rcond=None)[0] / scale).tolist()
    if not form.start:
        found.insert(2, 0.0)
    return Device(form, *found)


def _slots(run: Run) -> int:
    return run.setting.samples * run.slicing + run.setting.pp - 1


def _messages(run: Run) -> float:
    return _slots(run) * run.setting.message_per_token * run.setting.tokens / run.slicing


def _column(run: Run) -> Sequence[float]:
    """How often a step pays for a FLOP, a pair, a start and a floor: every slice once, the last pp − 1 times more."""
    setting, slots, length = run.setting, _slots(run), run.setting.tokens / run.slicing
    if run.slicing == FINE:
        return 0.0, 0.0, slots, slots * setting.stage_layers
    triangle = setting.samples * sum(length * length * (n + 1) for n in range(run.slicing))
    pairs = setting.heads_per_gpu * (triangle + (setting.pp - 1) * length * setting.tokens)
    return slots * length * setting.flops_per_token, pairs, slots, 0.0
