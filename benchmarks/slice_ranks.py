"""The rank's side of `slices.py`: what slices of each kind of block take, and steps of all plans of a case in turn.

All ranks measure blocks at the same time, as they compute at the same time in a pipeline. A step begins on all ranks at
once, after a barrier, and is what training does.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from compare_setting import LR, Setting
from own_runs_rank import recorded
from schedule_ranks import measure_link
from torch import Tensor

from phalanx.comm.links import Links
from phalanx.config import RunConfig
from phalanx.launch.context import RankContext
from phalanx.model.captured import Captured
from phalanx.model.slicing import slice_model
from phalanx.params.flat import Piece
from phalanx.plan.plan import Plan
from phalanx.predict.costs import Link
from phalanx.predict.timeline import Timeline
from phalanx.profile import beside
from phalanx.profile.slice_fit import Measurement, grid
from phalanx.profile.slice_run import SliceRun, layers
from phalanx.session.session import Session
from phalanx.tasks.base import Batch

WARM_UP, RECORDED, GRADIENT_BYTES = 1, 3, 4


@dataclass(frozen=True)
class Case:
    """plans: by name, all for the batch of the setting. compile: as in a run's configuration."""

    setting: Setting
    plans: Mapping[str, Plan]
    rounds: int
    compile: str = "off"


@dataclass(frozen=True)
class Effort:
    """Of a profile: slices from `shortest` tokens on, each measured `repeats` times. transfers: bytes of those that are
    measured."""

    shortest: int
    repeats: int
    transfers: tuple[int, ...]


@dataclass(frozen=True)
class Kind:
    """A kind of block: its slices, and which part of a pass to and fro is the forward's."""

    slices: tuple[Measurement, ...]
    forward: float


@dataclass(frozen=True)
class Facts:
    """What one rank knows for the simulation. parts: its part of recorded steps. others: what ranks do to each
    other."""

    first: Kind
    layer: Kind
    last: Kind
    link: Link
    parts: tuple[Timeline, ...]
    others: beside.Seen


@dataclass(frozen=True)
class Memory:
    """Bytes on the device before a step, at its peak, and of all gradients; None on a CPU."""

    before: int | None
    peak: int | None
    gradients: int


@dataclass
class Seen:
    """By plan: seconds of every step, memory, and the most forwards held at once, on one rank."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    memory: dict[str, Memory] = field(default_factory=dict)
    held: dict[str, int] = field(default_factory=dict)


def profile(context: RankContext, case: Case, captured: Captured, effort: Effort) -> Facts:
    """The job of one rank; the case has one plan, without slices."""
    (plan,) = case.plans.values()
    setting, device = case.setting, torch.device(context.device)
    sliced = slice_model(captured, setting.torch_dtype)
    numbers = (0, layers(sliced)[0], len(captured.blocks.blocks) - 1)
    one = {name: tensor[:1] for name, tensor in setting.batch().items()}

    def run_of(number: int) -> SliceRun:
        return SliceRun(sliced, one, [number], dtype=setting.torch_dtype, device=device, compile=case.compile)

    def kind(number: int) -> Kind:
        found = _kind(run_of(number), effort, attends=number == numbers[1])
        _say(context, f"slices of {captured.blocks.blocks[number].name} measured")
        return found

    first, layer, last = map(kind, numbers)
    links = Links(context)
    others = _others(links, run_of(numbers[1]), effort)
    _say(context, "ranks beside each other measured")
    session = _build(context, case, plan, captured, links)
    batch = {name: tensor.to(device) for name, tensor in setting.batch().items()}
    session.step(batch, 0, LR).read()
    size = setting.size
    link = measure_link(session, size.tokens * size.width, setting.torch_dtype)
    parts = tuple(recorded(session, batch) for _ in range(RECORDED))
    _close(links, session)
    return Facts(first, layer, last, link, parts, others)


def _others(links: Links, layer: SliceRun, effort: Effort) -> beside.Seen:
    """Beside slices of a layer, as long as those of which most are run."""
    run = layer.run(max(effort.shortest, layer.tokens // 16), 0)
    return beside.measure(beside.Together(links), run, beside.product(links.device), effort.transfers)


def run_case(context: RankContext, case: Case, captured: Captured) -> Seen:
    """The job of one rank: every plan built once, then all in turn."""
    batch = {name: tensor.to(torch.device(context.device)) for name, tensor in case.setting.batch().items()}
    links = Links(context)
    sessions = {name: _build(context, case, plan, captured, links) for name, plan in case.plans.items()}
    seen = Seen(
        held={name: session.compiled.programs.held_activations(context.rank) for name, session in sessions.items()}
    )
    for name, session in sessions.items():
        _warm_up(session, batch)
        seen.memory[name] = _memory(session, batch)
        _say(context, f"{case.plans[name].shown} ready")
    for _ in range(case.rounds):
        for name, session in sessions.items():
            _warm_up(session, batch)
            seen.seconds.setdefault(name, []).append(_seconds(session, batch))
    _close(links, *sessions.values())
    return seen


def _warm_up(session: Session, batch: Batch) -> None:
    """What other plans left free goes back to the device, and this one takes what it needs."""
    _give_back()
    for _ in range(WARM_UP):
        session.step(batch, 0, LR).read()


def _say(context: RankContext, text: str) -> None:
    if context.rank == 0:
        context.emit("progress", text)


def _kind(run: SliceRun, effort: Effort, attends: bool) -> Kind:
    """Without attention the past makes no difference."""
    points = [point for point in grid(run.tokens, effort.shortest) if attends or point[1] == 0]
    rounds = [[run(*point) for point in points] for _ in range(effort.repeats + 1)][1:]
    found = [Measurement(*point, statistics.median(seconds)) for point, seconds in zip(points, zip(*rounds))]
    forward, backward = run.parts(run.tokens, 0)
    return Kind(tuple(found), forward / (forward + backward))


def _build(context: RankContext, case: Case, plan: Plan, captured: Captured, links: Links) -> Session:
    device, setting = torch.device(context.device), case.setting

    def read(name: str, is_master: bool, piece: Piece | None) -> Tensor:
        shape = captured.shapes[name] if piece is None else (piece.stop - piece.start,)
        value = torch.empty(shape, device=device)
        return value.normal_(0, 0.02) if len(captured.shapes[name]) > 1 else value.fill_(1.0)

    config = RunConfig.create(
        lr=LR,
        dtype=setting.dtype,
        master_weights=setting.masters,
        batch_size=setting.size.samples,
        compile=case.compile,
        optimizer="sgd",  # all plans of a case are on the device at once: it keeps no state
    )
    return Session.open(
        captured, config, plan, context=context, links=links, trainable=captured.trainable, read=read,
        buffers={name: value.to(device) for name, value in captured.buffers.items()},
    )  # fmt: skip


def _seconds(session: Session, batch: Batch) -> float:
    _meet(session)
    begin = time.perf_counter()
    session.step(batch, 0, LR).read()
    return time.perf_counter() - begin


def _memory(session: Session, batch: Batch) -> Memory:
    gradients = GRADIENT_BYTES * sum(weight.exact.numel() for weight in session.state.parameters.trained.values())
    if session.compiled.device.type != "cuda":
        return Memory(None, None, gradients)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    session.step(batch, 0, LR).read()
    return Memory(before, torch.cuda.max_memory_allocated(), gradients)


def _close(links: Links, *sessions: Session) -> None:
    for session in sessions:
        session.close()
    links.close()
    _give_back()


def _give_back() -> None:
    """To the device, which all ranks share. Running out of memory in the middle of a step would not only be slow:
    giving back waits for messages that may be waiting for this rank."""
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _meet(session: Session) -> None:
    session.connected.world.barrier().wait("all ranks")


def median_of(found: Sequence[Kind]) -> Kind:
    """Of what several ranks measured."""
    slices = tuple(
        replace(points[0], seconds=statistics.median(point.seconds for point in points))
        for points in zip(*(kind.slices for kind in found), strict=True)
    )
    return Kind(slices, statistics.median(kind.forward for kind in found))
