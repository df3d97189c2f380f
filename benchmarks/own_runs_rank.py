"""The rank's side of `own_runs.py`: profiles what ranks do, and times steps of every plan in turn. Not for users.

Every pass has a profile and a step of each plan, so that a machine that becomes slower does so for both. Nothing of a
plan's own steps enters its profile.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from compare_setting import Setting
from torch import Tensor

from phalanx.comm.links import Links
from phalanx.config import RunConfig
from phalanx.engine.compiled import Compiled
from phalanx.engine.inputs import split
from phalanx.engine.measured import recording
from phalanx.launch.context import RankContext
from phalanx.model.captured import Captured
from phalanx.params.flat import Piece
from phalanx.plan.plan import Plan
from phalanx.predict.timeline import Timeline
from phalanx.profile import beside
from phalanx.profile.segments import Effort, Found, Segments, SegmentTimes, time_segment
from phalanx.program.instructions import Op
from phalanx.session.session import Session

LR = 1e-3
REFERENCES = (1, 2, 4)  # micro-batches of one rank that does everything
WARM_UP, STEPS = 2, 2
EFFORT = Effort(rounds=2, seconds=0.01)  # of every pass


@dataclass(frozen=True)
class Task:
    """sizes: bytes of transfers that are measured. is_recorded: steps of each plan are also measured instruction by
    instruction."""

    setting: Setting
    plans: Mapping[str, Plan]
    passes: int
    device: str
    sizes: tuple[int, ...]
    world: int = 4
    is_recorded: bool = False


@dataclass
class Seen:
    """What a rank saw, of every pass. segments: by the kind of plan and place; references: by micro-batches, seconds of
    a step; update: of NORM and STEP, for all parameters; steps: by plan; parts: its part of recorded steps."""

    segments: dict[Plan, dict[tuple[int, int], list[SegmentTimes]]] = field(default_factory=dict)
    others: list[beside.Seen] = field(default_factory=list)
    references: dict[int, list[float]] = field(default_factory=dict)
    update: list[float] = field(default_factory=list)
    steps: dict[str, list[float]] = field(default_factory=dict)
    parts: dict[str, list[Timeline]] = field(default_factory=dict)


def whole(plan: Plan, blocks: int) -> Plan:
    """All blocks of a plan on one place of the pipeline, of one replica and micro-batch: plans of which this is the
    same run the same segments."""
    return Plan(tp=plan.tp, stages=(blocks,), degrees=plan.degrees, sequence=plan.sequence, recompute=plan.recompute,
                overlap=plan.overlap, save=plan.save)  # fmt: skip


def samples_of(plan: Plan, batch: int) -> int:
    """Of a micro-batch, the largest."""
    return split(split(batch, plan.dp)[0], plan.mb)[0]


def kinds_of(task: Task, captured: Captured) -> dict[str, tuple[Plan, int]]:
    """Of every plan, and of the references: what its segments are, and the samples of its micro-batches."""
    blocks, batch = len(captured.blocks.blocks), task.setting.size.samples
    found = {name: (whole(plan, blocks), samples_of(plan, batch)) for name, plan in task.plans.items()}
    return found | {f"reference {mb}": (Plan(stages=(blocks,)), batch // task.world // mb) for mb in REFERENCES}


def measure(context: RankContext, task: Task, captured: Captured) -> Seen:
    """The job of one rank."""
    if context.device == "cpu":
        torch.set_num_threads(1)
    links = Links(context)
    ranks, seen = beside.Together(links), Seen()
    profile = _Profile(task, captured, ranks)
    references = {mb: _reference(task, captured, mb, context.device) for mb in REFERENCES}
    sessions = {name: _open(links.context, task, plan, captured, task.setting.size.samples, links)
                for name, plan in task.plans.items()}  # fmt: skip
    batch = {name: tensor.to(links.device) for name, tensor in task.setting.batch().items()}
    for name, session in sessions.items():
        for _ in range(WARM_UP):
            session.step(_part(session, batch), 0, LR).read()
        if context.rank == 0:
            context.emit("ready", name)
    for number in range(task.passes):
        profile.pass_over(seen)
        _time_references(references, batch, ranks, seen)
        for name, session in sessions.items():
            seen.steps.setdefault(name, []).append(_seconds(session, _part(session, batch), ranks))
            if task.is_recorded:
                seen.parts.setdefault(name, []).append(recorded(session, _part(session, batch)))
        if context.rank == 0:
            context.emit("pass", f"{number + 1} of {task.passes}")
    for session in (*sessions.values(), *references.values()):
        session.close()
    links.close()
    return seen


class _Profile:
    """Segments that any plan runs, each once, and what ranks do to each other."""

    def __init__(self, task: Task, captured: Captured, ranks: beside.Together) -> None:
        self._task, self._ranks = task, ranks
        self._kinds: dict[Plan, list[tuple[Segments, Found]]] = {}
        for kind, samples in dict.fromkeys(kinds_of(task, captured).values()):
            segments = Segments(_compiled(captured, task, kind, samples, ranks.device), _samples(task, samples))
            self._kinds[replace(kind, mb=samples)] = [(segments, found) for found in segments.found]
        usual = self._kinds[max(self._kinds, key=lambda kind: (-kind.tp, kind.mb))]
        segments, found = max(usual, key=lambda own: len(own[1].places))
        self._layer = segments.copies(found)[0]

    def pass_over(self, seen: Seen) -> None:
        known: dict[str, SegmentTimes] = {}
        for kind, own in self._kinds.items():
            for segments, found in own:
                if found.name not in known:
                    known[found.name] = time_segment(segments, found, self._ranks.device, self._ranks.most, EFFORT)
                for place in found.places:
                    seen.segments.setdefault(kind, {}).setdefault((place.block, place.op_index), []).append(
                        known[found.name]
                    )
        forward, backward = self._layer.forward, self._layer.part("together") or self._layer.forward
        with torch.no_grad():
            seen.others.append(
                beside.measure(
                    self._ranks, lambda: (forward(), backward()), beside.product(self._ranks.device), self._task.sizes
                )
            )


def _samples(task: Task, count: int) -> dict[str, Tensor]:
    return {name: tensor[:count] for name, tensor in task.setting.batch().items()}


def _compiled(captured: Captured, task: Task, plan: Plan, samples: int, device: torch.device) -> Compiled:
    return Compiled(
        captured, _config(task, samples), plan, rank=0, device=device, trainable=captured.trainable,
        buffers={name: value.to(device) for name, value in captured.buffers.items()},
    )  # fmt: skip


def _config(task: Task, samples: int) -> RunConfig:
    setting = task.setting
    return RunConfig.create(
        lr=LR, dtype=setting.dtype, master_weights=setting.masters, batch_size=samples, compile="off"
    )


def _reference(task: Task, captured: Captured, mb: int, device: str) -> Session:
    plan = Plan(mb=mb, stages=(len(captured.blocks.blocks),))
    session = _open(RankContext.alone(device), task, plan, captured, task.setting.size.samples // task.world, None)
    for _ in range(WARM_UP):
        session.step(_samples(task, task.setting.size.samples // task.world), 0, LR).read()
    return session


def _time_references(
    sessions: Mapping[int, Session], batch: Mapping[str, Tensor], ranks: beside.Together, seen: Seen
) -> None:  # fmt: skip
    """All ranks do the same beside each other."""
    for mb, session in sessions.items():
        own = {name: tensor[: session.compiled.samples * mb] for name, tensor in batch.items()}
        seen.references.setdefault(mb, []).append(_seconds(session, own, ranks))
    session = sessions[1]
    ranks.most(0.0)
    with recording(session.step.engine) as recorder:
        session.step({name: tensor[: session.compiled.samples] for name, tensor in batch.items()}, 0, LR).read()
    events = recorder.timeline().events
    seen.update.append(ranks.most(sum(e.seconds for e in events if e.instruction.op in (Op.NORM, Op.STEP))))


def _seconds(session: Session, batch: dict[str, Tensor], ranks: beside.Together) -> float:
    """Of a step, of a few that follow each other and one before, which leaves on its way what steps leave: the slowest
    rank's."""
    ranks.most(0.0)
    session.step(batch, 0, LR).read()
    begin = time.perf_counter()
    for _ in range(STEPS):
        session.step(batch, 0, LR).read()
    return ranks.most((time.perf_counter() - begin) / STEPS)


def recorded(session: Session, batch: Mapping[str, Tensor]) -> Timeline:
    """A step from its first instruction on, which all ranks begin at once."""
    step = session.step.begin(batch, 0, LR)
    with recording(session.step.engine) as recorder:
        session.connected.world.barrier().wait("all ranks")
        session.step.engine.run(session.step.program, step)
    return recorder.timeline()


def _part(session: Session, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    first, count = session.part(0, next(iter(batch.values())).shape[0])
    return {name: tensor[first : first + count] for name, tensor in batch.items()}


def _open(context: RankContext, task: Task, plan: Plan, captured: Captured, batch: int, links: Links | None) -> Session:
    device = torch.device(context.device)

    def read(name: str, is_master: bool, piece: Piece | None) -> Tensor:
        shape = captured.shapes[name] if piece is None else (piece.stop - piece.start,)
        value = torch.empty(shape, device=device)
        return value.normal_(0, 0.02) if len(captured.shapes[name]) > 1 else value.fill_(1.0)

    return Session.open(
        captured, _config(task, batch), plan, context=context, trainable=captured.trainable, read=read, links=links,
        buffers={name: value.to(device) for name, value in captured.buffers.items()},
    )  # fmt: skip


def usual(times: list[SegmentTimes]) -> SegmentTimes:
    """The median of all passes."""
    return SegmentTimes(*(median(column) for column in zip(*times, strict=True)))
