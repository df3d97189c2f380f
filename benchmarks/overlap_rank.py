"""The rank's side of `overlap.py`. Not for users.

It builds every mode on the same weights, checks that they compute the same loss, and times them in turn: a step, then
its computation alone, then its communication alone.
"""

from __future__ import annotations

import statistics
import sys
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from compare_setting import Setting
from overlap_silence import Communication, silent
from torch import Tensor

from phalanx.comm.links import Links
from phalanx.config import RunConfig
from phalanx.launch.context import RankContext
from phalanx.model.captured import Captured
from phalanx.params.flat import Piece
from phalanx.plan.plan import Plan
from phalanx.session.session import Session

KINDS = ("step", "compute", "communication")
_STILL = 0.0  # the learning rate: steps with nothing sent would spoil the weights
_WARM_UP, _TRIED = 2, 3
_IDLE = 4  # communication alone gets faster at first: connections learn how much they may have under way


@dataclass(frozen=True)
class Task:
    """plans: by mode; the first one is calibrated. wanted: between what its compute : communication must lie before
    anything else is timed. steps: per measurement."""

    setting: Setting
    plans: Mapping[str, Plan]
    wanted: tuple[float, float]
    rounds: int
    steps: int
    device: str
    compiled: str


@dataclass
class Seen:
    """What one rank measured, by mode. `calibration`: seconds of computation and of communication of the first mode, on
    the slowest rank. seconds: by mode and kind, of every round; empty where the calibration was not as wanted."""

    calibration: tuple[float, float]
    losses: dict[str, float] = field(default_factory=dict)
    collectives: dict[str, tuple[int, int]] = field(default_factory=dict)  # number, bytes
    seconds: dict[str, dict[str, list[float]]] = field(default_factory=dict)


class Mode:
    """One mode, ready to run."""

    def __init__(self, links: Links, task: Task, name: str, captured: Captured) -> None:
        self.session = _build(links, task, name, captured)
        self._steps = task.steps
        self._batch = {n: tensor.to(self.session.compiled.device) for n, tensor in task.setting.batch().items()}
        self.loss = [self._step() for _ in range(_WARM_UP)][-1]
        with silent(self.session) as calls:
            self._step()
        self.communication = Communication(calls, self.session.compiled.device)
        self.communication()

    def seconds(self, kind: str) -> float:
        if kind == "step":
            return self._timed(self._step)
        if kind == "communication":
            return self._timed(self.communication)
        with silent(self.session):
            return self._timed(self._step)

    def _step(self) -> float:
        return self.session.step(self._batch, 0, _STILL).read()[0]

    def _timed(self, work: Callable[[], object]) -> float:
        self.session.connected.world.barrier().wait("all ranks")
        begin = time.perf_counter()
        for _ in range(self._steps):
            work()
        if self.session.compiled.device.type == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - begin) / self._steps


def measure(context: RankContext, task: Task, captured: Captured) -> Seen:
    """The job of one rank."""
    first, *others = task.plans
    links = Links(context)
    modes = {first: Mode(links, task, first, captured)}
    seen = Seen(_calibration(modes[first]))
    if _fits(seen.calibration, task.wanted):
        modes |= {name: Mode(links, task, name, captured) for name in others}
        seen.losses = {name: mode.loss for name, mode in modes.items()}
        calls = {name: mode.communication.calls for name, mode in modes.items()}
        seen.collectives = {name: (len(own), sum(call.nbytes for call in own)) for name, own in calls.items()}
        seen.seconds = {name: {kind: [] for kind in KINDS} for name in modes}
        for number in range(task.rounds):
            names = list(modes)
            turn = number % len(names)
            for name in names[turn:] + names[:turn]:
                for kind in KINDS:
                    seen.seconds[name][kind].append(modes[name].seconds(kind))
    for mode in modes.values():
        mode.session.close()
    links.close()
    return seen


def _fits(calibration: tuple[float, float], wanted: tuple[float, float]) -> bool:
    compute, communication = calibration
    return wanted[0] <= compute / communication <= wanted[1]


def _calibration(mode: Mode) -> tuple[float, float]:
    """The same numbers on every rank, so that all decide alike."""
    for _ in range(_IDLE):
        mode.communication()
    found = [statistics.median(mode.seconds(kind) for _ in range(_TRIED)) for kind in ("compute", "communication")]
    slowest = torch.tensor(found, dtype=torch.float64, device=mode.session.compiled.device)
    mode.session.connected.world.all_reduce(slowest, "max").wait("the calibration")
    compute, communication = slowest.tolist()
    return compute, communication


def _build(links: Links, task: Task, name: str, captured: Captured) -> Session:
    context, device = links.context, links.device

    def read(name: str, is_master: bool, piece: Piece) -> Tensor:
        """The same for every mode."""
        value = torch.empty(piece.stop - piece.start, device=device)
        if len(captured.shapes[name]) == 1:
            return value.fill_(1.0)
        generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
        return value.normal_(0, 0.02, generator=generator)

    config = RunConfig.create(
        dtype=task.setting.dtype, master_weights=task.setting.masters, batch_size=task.setting.size.samples,
        compile=task.compiled, optimizer="sgd",
    )  # fmt: skip
    return Session.open(
        captured, config, task.plans[name], context=context, links=links, trainable=captured.trainable, read=read,
        buffers={n: value.to(device) for n, value in captured.buffers.items()},
    )  # fmt: skip
