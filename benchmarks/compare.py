"""A comparison: Phalanx and torch's own tools train the same model on the same ranks, in turn, in one run.

Every rank builds all sides, checks that they compute the same losses, and then times them in alternating rounds:
load on the machine hits all alike, and a ratio is formed within a round. A round takes as long as its slowest rank.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from compare_setting import BETAS, CLIP, EPS, LR, WEIGHT_DECAY, Setting
from torch import Tensor

from phalanx.config import RunConfig
from phalanx.launch.context import RankContext
from phalanx.model.captured import Captured
from phalanx.params.flat import Piece
from phalanx.plan.plan import Plan
from phalanx.session.session import Session

OURS = "phalanx"
CHECKED_STEPS = 4
TOLERANCE = {"float32": 2e-4, "bfloat16": 2e-2}  # relative, of losses after up to CHECKED_STEPS updates

Step = Callable[[], Callable[[], float]]
"""Trains one step; what it returns gives the loss of the global batch, waiting for it."""
Build = Callable[[RankContext, Setting, Plan], Step]


@dataclass(frozen=True)
class Comparison:
    """One plan of ours against sides that do the same with torch. `rivals`: functions that ranks can import."""

    setting: Setting
    plan: Plan
    rivals: Mapping[str, Build]
    rounds: int
    steps: int  # per round


@dataclass(frozen=True)
class Measured:
    """What one rank saw, by side: losses of the first steps; of every round the seconds that a step took, and
    those for which processors worked for it, which other load on the machine changes less; polled: those of them that
    threads of NCCL took, which ask again and again whether something came."""

    losses: dict[str, list[float]]
    seconds: dict[str, list[float]]
    worked: dict[str, list[float]]
    polled: dict[str, list[float]]


def compare(context: RankContext, comparison: Comparison, captured: Captured) -> Measured:
    """The job of one rank."""
    device = torch.device(context.device)
    _join_torch(context, device)
    session = our_rank(context, comparison.setting, comparison.plan, captured)
    entrants = {OURS: our_step(session, comparison.setting)}
    entrants |= {name: build(context, comparison.setting, comparison.plan) for name, build in comparison.rivals.items()}
    losses = {name: [step()() for _ in range(CHECKED_STEPS)] for name, step in entrants.items()}
    measured = Measured(losses, *({name: [] for name in entrants} for _ in range(3)))
    for number in range(comparison.rounds):
        names = list(entrants)
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            seconds, worked, polled = _time(entrants[name], comparison.steps, device)
            measured.seconds[name].append(seconds)
            measured.worked[name].append(worked)
            measured.polled[name].append(polled)
    session.close()
    dist.destroy_process_group()
    return measured


def our_rank(context: RankContext, setting: Setting, plan: Plan, captured: Captured) -> Session:
    initial = dict(setting.module().named_parameters())

    def read(name: str, is_master: bool, piece: Piece | None) -> Tensor:
        value = initial[name].detach()
        return value if piece is None else value.reshape(-1)[piece.start : piece.stop]

    config = RunConfig.create(
        lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, clip=CLIP, dtype=setting.dtype,
        master_weights=setting.masters, batch_size=setting.size.samples,
    )  # fmt: skip
    device = torch.device(context.device)
    return Session.open(
        captured, config, plan, context=context, trainable=captured.trainable, read=read,
        buffers={name: value.to(device) for name, value in captured.buffers.items()},
    )  # fmt: skip


def our_step(session: Session, setting: Setting) -> Step:
    first, count = session.part(0, setting.size.samples)
    mine = {name: tensor[first : first + count].to(session.compiled.device) for name, tensor in setting.batch().items()}

    def step() -> Callable[[], float]:
        outcome = session.step(mine, first, LR)
        return lambda: outcome.read()[0]

    return step


def _join_torch(context: RankContext, device: torch.device) -> None:
    """The process-wide group that torch's tools work on."""
    store = dist.PrefixStore("torch", context.store.for_torch)
    backend = "nccl" if device.type == "cuda" else "gloo"
    deadline = timedelta(seconds=60)
    dist.init_process_group(backend, store=store, rank=context.rank, world_size=context.world, timeout=deadline)


def _time(step: Step, steps: int, device: torch.device) -> tuple[float, float, float]:
    _meet(device)
    before = time.perf_counter(), time.process_time(), _nccl_seconds()
    for _ in range(steps):
        step()
    _synchronise(device)
    after = time.perf_counter(), time.process_time(), _nccl_seconds()
    seconds, worked, polled = ((end - begin) / steps for begin, end in zip(before, after, strict=True))
    return seconds, worked, polled


def _nccl_seconds() -> float:
    """Processor time of NCCL's threads, which are named where NCCL_SET_THREAD_NAME is set."""
    found = 0.0
    for thread in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # it ended
            if (thread / "comm").read_text().startswith("NCCL"):
                found += int((thread / "schedstat").read_text().split()[0]) / 1e9
    return found


def _meet(device: torch.device) -> None:
    """All ranks, with nothing left to do."""
    dist.all_reduce(torch.zeros(1, device=device))
    _synchronise(device)


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def combine(measured: list[Measured], dtype: str) -> dict[str, Any]:
    """All ranks as one: the slowest rank of each round, and each rival's time as a multiple of ours."""
    losses = measured[0].losses
    names = list(measured[0].seconds)
    seconds = {name: [max(times) for times in zip(*(m.seconds[name] for m in measured))] for name in names}
    for name in names:
        if any(abs(a - b) > TOLERANCE[dtype] * abs(b) for a, b in zip(losses[OURS], losses[name])):
            raise SystemExit(f"{OURS} and {name} do not train alike: losses {losses[OURS]} and {losses[name]}")
    worked = {name: [sum(times) for times in zip(*(m.worked[name] for m in measured))] for name in names}
    polled = {name: [sum(times) for times in zip(*(m.polled[name] for m in measured))] for name in names}
    return {
        "losses": losses[OURS], "seconds": {name: quartiles(values) for name, values in seconds.items()},
        "ratios": _ratios(seconds), "processor_ratios": _ratios(worked),
        "processor_seconds": {name: quartiles(values) for name, values in worked.items()},
        "nccl_seconds": {name: quartiles(values) for name, values in polled.items()},
    }  # fmt: skip


def _ratios(times: Mapping[str, list[float]]) -> dict[str, dict[str, float]]:
    """Theirs over ours, within each round."""
    rivals = {name: values for name, values in times.items() if name != OURS}
    return {name: quartiles([b / a for a, b in zip(times[OURS], values)]) for name, values in rivals.items()}


def quartiles(values: list[float]) -> dict[str, float]:
    low, _, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    return {"median": statistics.median(values), "low": low, "high": high, "repeats": len(values)}


def verdict(ratio: Mapping[str, float]) -> str:
    """faster or slower where even the quartile says so, else even."""
    if ratio["low"] > 1.0:
        return "faster"
    return "slower" if ratio["high"] < 1.0 else "even"
