"""The rank's side of `scaling.py`: trainings on 1, 2, 4 … of the ranks of one worker pool, in turn, step by step.

Rank 0 takes part in all of them, and each step begins with a barrier of its ranks: they never run at the same time.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from compare_setting import LR, Setting
from torch import Tensor

from phalanx.config import RunConfig
from phalanx.lab.rehearsal import Durations, replace_compute
from phalanx.launch.context import RankContext
from phalanx.model.captured import Captured
from phalanx.params.flat import Piece
from phalanx.plan.plan import Plan
from phalanx.session.session import Session

WARM_UP = 2


@dataclass(frozen=True)
class Training:
    """One plan and the batch it is measured with. durations: waits that stand for computation; None: compute."""

    name: str
    setting: Setting
    plan: Plan
    durations: Durations | None = None


def run_in_turn(
    context: RankContext, trainings: Sequence[Training], rounds: int, captured: Captured
) -> dict[str, list[float]]:
    """The job of one rank: seconds of every step of the trainings in which it takes part."""
    mine = [training for training in trainings if context.rank < training.plan.world]
    sessions = {training.name: _build(context, training, captured) for training in mine}
    batches = {training.name: _part(sessions[training.name], training.setting) for training in mine}
    for name, session in sessions.items():
        for _ in range(WARM_UP):
            _step(session, *batches[name])
    seconds: dict[str, list[float]] = {name: [] for name in sessions}
    for _ in range(rounds):
        for name, session in sessions.items():
            seconds[name].append(_step(session, *batches[name]))
    for session in sessions.values():
        session.close()
    return seconds


def slowest(found: Sequence[Mapping[str, list[float]]], name: str) -> list[float]:
    """A step takes as long as on the slowest rank."""
    return [max(times) for times in zip(*(seconds[name] for seconds in found if name in seconds), strict=True)]


def _build(context: RankContext, training: Training, captured: Captured) -> Session:
    world = training.plan.world
    # The trainings have links of the same names.
    own = RankContext.alone() if world == 1 else replace(context, world=world, store=context.store.part(training.name))

    def read(name: str, is_master: bool, piece: Piece | None) -> Tensor:
        shape = captured.shapes[name] if piece is None else (piece.stop - piece.start,)
        return torch.full(shape, 1.0) if len(captured.shapes[name]) == 1 else torch.empty(shape).normal_(0, 0.02)

    config = RunConfig.create(lr=LR, batch_size=training.setting.size.samples)
    session = Session.open(
        captured, config, training.plan, context=own, trainable=captured.trainable, read=read,
        buffers=dict(captured.buffers),
    )  # fmt: skip
    if training.durations is not None:
        replace_compute(session.step.engine, training.durations)
    return session


def _part(session: Session, setting: Setting) -> tuple[dict[str, Tensor], int]:
    first, count = session.part(0, setting.size.samples)
    return {name: tensor[first : first + count] for name, tensor in setting.batch().items()}, first


def _step(session: Session, batch: Mapping[str, Tensor], first: int) -> float:
    session.connected.world.barrier().wait("all ranks")
    begin = time.perf_counter()
    session.step(batch, first, LR).read()
    return time.perf_counter() - begin
