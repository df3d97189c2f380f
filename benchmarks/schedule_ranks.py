"""The rank's side of `schedules.py` where computation is a timed wait: every schedule is built once, and then they run
in turn, step by step.

A recorded step begins on all ranks at once, after a barrier, and is nothing but its program; a whole step is what
training does, micro-batches cut and all. Links are measured by passing a message to and fro.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from compare_setting import Setting
from own_runs_rank import recorded
from torch import Tensor

from phalanx.comm.links import Links
from phalanx.comm.pending import Pending
from phalanx.config import RunConfig
from phalanx.lab.rehearsal import Durations, replace_compute
from phalanx.launch.context import RankContext
from phalanx.model.captured import Captured
from phalanx.params.flat import Piece
from phalanx.plan.plan import Plan
from phalanx.predict.costs import Link
from phalanx.predict.timeline import Timeline
from phalanx.session.session import Session

LR = 1e-3
WARM_UP, GROUPS, ROUND_TRIPS, SMALL = 2, 9, 5, 64


@dataclass(frozen=True)
class Bench:
    """durations: waits that stand for computation. All plans cut micro-batches of the same size."""

    setting: Setting
    plans: Mapping[str, Plan]
    rounds: int
    durations: Durations

    def micro_batch(self) -> dict[str, Tensor]:
        (mb,) = {plan.mb for plan in self.plans.values()}
        return self.setting.share(0, mb, "cpu")

    @property
    def cut_elements(self) -> int:
        """What crosses a cut in one message."""
        return self.micro_batch()["input_ids"].numel() * self.setting.size.width


@dataclass
class Timed:
    """What one rank measured: by schedule, its part of every recorded step and the seconds of every whole one."""

    link: Link
    parts: dict[str, list[Timeline]] = field(default_factory=dict)
    seconds: dict[str, list[float]] = field(default_factory=dict)


def run_bench(context: RankContext, bench: Bench, captured: Captured) -> Timed:
    """The job of one rank."""
    batch = {name: tensor.to(torch.device(context.device)) for name, tensor in bench.setting.batch().items()}
    sessions: dict[str, Session] = {}
    links = Links(context)
    for name, plan in bench.plans.items():
        sessions[name] = _build(links, bench, plan, captured)
        for _ in range(WARM_UP):
            sessions[name].step(batch, 0, LR).read()
        if context.rank == 0:
            context.emit("ready", name)
    seen = Timed(measure_link(next(iter(sessions.values())), bench.cut_elements, bench.setting.torch_dtype))
    for _ in range(bench.rounds):
        for name, session in sessions.items():
            seen.parts.setdefault(name, []).append(recorded(session, batch))
            seen.seconds.setdefault(name, []).append(_whole(session, batch))
    for session in sessions.values():
        session.close()
    links.close()
    return seen


def _build(links: Links, bench: Bench, plan: Plan, captured: Captured) -> Session:
    device, setting = links.device, bench.setting

    def read(name: str, is_master: bool, piece: Piece | None) -> Tensor:
        shape = captured.shapes[name] if piece is None else (piece.stop - piece.start,)
        value = torch.empty(shape, device=device)
        return value.normal_(0, 0.02) if len(captured.shapes[name]) > 1 else value.fill_(1.0)

    config = RunConfig.create(
        lr=LR, dtype=setting.dtype, master_weights=setting.masters, batch_size=setting.size.samples, compile="off"
    )
    session = Session.open(
        captured, config, plan, context=links.context, links=links, trainable=captured.trainable, read=read,
        buffers={name: value.to(device) for name, value in captured.buffers.items()},
    )  # fmt: skip
    replace_compute(session.step.engine, bench.durations)
    return session


def _whole(session: Session, batch: Mapping[str, Tensor]) -> float:
    _meet(session)
    begin = time.perf_counter()
    session.step(batch, 0, LR).read()
    return time.perf_counter() - begin


def _meet(session: Session) -> None:
    session.connected.world.barrier().wait("all ranks")


def measure_link(session: Session, elements: int, dtype: torch.dtype) -> Link:
    """What connects rank 0 and rank 1, from a small message and one of so many elements."""
    width = dtype.itemsize
    small, large = (_one_way(session, n, dtype) for n in (elements // SMALL, elements))
    if large <= small:
        return Link(latency_s=large)
    bytes_per_s = (elements - elements // SMALL) * width / (large - small)
    return Link(max(0.0, large - elements * width / bytes_per_s), bytes_per_s)


def _one_way(session: Session, elements: int, dtype: torch.dtype) -> float:
    """Seconds of one message, on rank 0; what others return has no meaning."""
    out, back = (torch.zeros(elements, dtype=dtype, device=session.compiled.device) for _ in range(2))
    found: list[float] = []
    for _ in range(GROUPS):
        _meet(session)
        begin = time.perf_counter()
        for _ in range(ROUND_TRIPS if session.compiled.rank < 2 else 0):
            _to_and_fro(session, out, back)
        if session.compiled.device.type == "cuda":
            torch.cuda.synchronize()
        found.append((time.perf_counter() - begin) / (2 * ROUND_TRIPS))
    _meet(session)
    return statistics.median(found)


def _to_and_fro(session: Session, out: Tensor, back: Tensor) -> None:
    is_first = session.compiled.rank == 0
    sent = _send(session, out) if is_first else None
    session.connected.channel(*((1, 0, "b") if is_first else (0, 1, "f"))).recv(back).wait("a message")
    (sent or _send(session, out)).wait("a message to leave")


def _send(session: Session, tensor: Tensor) -> Pending:
    way = (0, 1, "f") if session.compiled.rank == 0 else (1, 0, "b")
    return session.connected.channel(*way).send(tensor)
