"""The rank's side of `migrate.py`: a session that goes to and fro between two plans, beside the same bytes sent plainly
and beside a checkpoint that is saved by one plan and loaded by the other."""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from compare_setting import Setting
from torch import Tensor

from phalanx.adapt.portions import gathered, move_bytes
from phalanx.comm.links import Links
from phalanx.config import RunConfig
from phalanx.engine.compiled import Compiled
from phalanx.engine.layout import ProcessGroups
from phalanx.launch.context import RankContext
from phalanx.model.captured import Captured
from phalanx.params.flat import Piece
from phalanx.plan.plan import Plan
from phalanx.session.ahead import Ahead
from phalanx.session.change import change, everyone, open_member
from phalanx.session.session import Opening, Session
from phalanx.session.spare import Member
from phalanx.state import checkpoint
from phalanx.state.rendezvous import Meeting, StoreRendezvous

LR = 1e-4
T = TypeVar("T")


@dataclass(frozen=True)
class Case:
    """What is measured: the change from one plan to the other, and back."""

    setting: Setting
    captured: Captured
    old: Plan
    new: Plan
    repeats: int
    folder: Path
    device: str
    compile: Any

    @property
    def samples(self) -> int:
        return self.setting.size.samples

    @cached_property
    def batch(self) -> dict[str, Tensor]:
        return {name: tensor.to(self.device) for name, tensor in self.setting.batch().items()}


@dataclass(frozen=True)
class Measured:
    """Of one rank, a number per repeat. pauses: until all state is in place. parts: of pauses, by name; and what the
    next step takes longer than usual, which is none of them. first: the pause of the first change, which makes
    the functions of the new plan."""

    first: float
    pauses: list[float]
    parts: dict[str, list[float]]
    plain: list[float]
    through_files: list[float]
    bytes: int
    state_bytes: int


def measure(context: RankContext, case: Case) -> Measured:
    opening = _opening(context, case)
    member = open_member(opening, case.old, _read(case.captured))
    _step(member, case)
    state_bytes = sum(data.nbytes for _, data in member.state.shards())
    began = time.perf_counter()
    member, done = change(member, case.new)
    _step(member, case)
    first = time.perf_counter() - began
    member, _ = change(member, case.old)
    _step(member, case)
    pauses: list[float] = []
    plain: list[float] = []
    through_files: list[float] = []
    parts: dict[str, list[float]] = {}
    for number in range(case.repeats):
        seconds, _ = _timed(member, _plainly, member, case, done.bytes > 0)
        plain.append(seconds)
        seconds, member = _timed(member, _changed, member, case.new, parts, _ahead(member, case, number))
        own, _ = _timed(member, _step, member, case)
        usual = statistics.median(_timed(member, _step, member, case)[0] for _ in range(3))
        parts.setdefault("next step", []).append(own - usual)
        pauses.append(seconds)
        member, _ = change(member, case.old)
        _step(member, case)
        seconds, _ = _timed(member, _through_files, member, case, context, number)
        through_files.append(seconds)
    member.close()
    return Measured(first, pauses, parts, plain, through_files, done.bytes, state_bytes)


def _ahead(member: Member, case: Case, number: int) -> Ahead:
    """What a run makes while it still trains under the old plan."""
    assert member.opening is not None

    def first_batch(of: Compiled) -> tuple[dict[str, Tensor], int]:
        first, count = of.part(0, case.samples)
        return {name: tensor[first : first + count] for name, tensor in case.batch.items()}, first

    found = Ahead(member, case.new, member.opening.config, f"ahead{number}", first_batch)
    while not found.is_ready:
        found.go_on(1.0)
        time.sleep(0.01)
    _step(member, case)
    return found


def _changed(member: Member, plan: Plan, parts: dict[str, list[float]], ahead: Ahead) -> Member:
    member, done = change(member, plan, ahead=ahead)
    with done.timed("arrive"):  # a run trains meanwhile, as far as it can
        member.state.settle()
    for name, seconds in done.seconds.items():
        parts.setdefault(name, []).append(seconds)
    return member


def _plainly(member: Member, case: Case, moves: bool) -> None:
    """As many bytes between the same ranks at once, out of one buffer and into another. moves: whether any do."""
    group, opening = everyone(member), member.opening
    assert opening is not None
    migration = opening.migrations.get((case.old, case.new))
    sizes = [[0] * len(group.ranks) for _ in group.ranks]
    for portion in migration.portions if migration is not None and moves else ():
        for move in (move for own in portion.rounds for move in own):
            sizes[move.source][move.destination] += move_bytes(move)
    for (source, destination), size in gathered(opening.layout(case.new)).items() if moves else ():
        sizes[source][destination] += size
    sent, received = sizes[group.index], [own[group.index] for own in sizes]
    out, into = (torch.zeros(sum(own), dtype=torch.uint8, device=group.links.device) for own in (sent, received))
    group.all_to_all(into, out, received, sent).wait("plain bytes")


def _through_files(member: Member, case: Case, context: RankContext, number: int) -> None:
    """A checkpoint saved by one plan and taken up by a new session of the other, in processes that are there."""
    folder, state = case.folder / str(number), member.state

    def meeting(name: str) -> Meeting:
        return Meeting(context.rank, context.world, StoreRendezvous(context.store, context.rank), key=f"{name}{number}")

    scalars, _ = state.scalars()
    path = checkpoint.save(folder, 1, state.shards(), {"optimizer": scalars}, 1, meeting=meeting("save"))
    found = checkpoint.open_together(path, meeting("open"))
    opening = member.opening
    assert opening is not None
    compiled = opening.compile(case.new)
    with Links(context, name=f"files{number}") as links:
        ProcessGroups(compiled.formation, links)
        again = opening.state(compiled, partial(_stored, found))
        again.restore(found, scalars, None)
    everyone(member).barrier().wait("all ranks")
    if context.rank == 0:
        shutil.rmtree(folder)


def _stored(found: checkpoint.Checkpoint, name: str, is_master: bool, piece: Piece) -> Tensor:
    return piece.read(found, f"{'master' if is_master else 'model'}/{name}")


def _timed(member: Member, action: Callable[..., T], *arguments: Any) -> tuple[float, T]:
    everyone(member).barrier().wait("all ranks")
    began = time.perf_counter()
    result = action(*arguments)
    everyone(result if isinstance(result, Session) else member).barrier().wait("all ranks")
    return time.perf_counter() - began, result


def _step(member: Member, case: Case) -> None:
    assert isinstance(member, Session)
    first, count = member.part(0, case.samples)
    member.step({name: tensor[first : first + count] for name, tensor in case.batch.items()}, first, LR).read()


def _opening(context: RankContext, case: Case) -> Opening:
    config = RunConfig.create(
        lr=LR, batch_size=case.samples, dtype=case.setting.dtype, master_weights=case.setting.masters,
        compile=case.compile, device=case.device,
    )  # fmt: skip
    captured = case.captured
    buffers = {name: tensor.to(case.device) for name, tensor in captured.buffers.items()}
    return Opening(captured, config, context, tuple(captured.trainable), buffers)


def _read(captured: Captured) -> Callable[[str, bool, Piece], Tensor]:
    def read(name: str, is_master: bool, piece: Piece) -> Tensor:
        shape = (piece.stop - piece.start,)
        return torch.ones(shape) if len(captured.shapes[name]) == 1 else torch.empty(shape).normal_(0, 0.02)

    return read
