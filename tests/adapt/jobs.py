"""What ranks do in tests of changes of plan: train tiny models, changing the plan between steps."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from phalanx.adapt import portions
from phalanx.adapt.exchange import Message, Staging
from phalanx.adapt.migrate import ChangeRefused, _Stream
from phalanx.comm.links import Links
from phalanx.config import RunConfig
from phalanx.errors import LinkError
from phalanx.launch.context import RankContext
from phalanx.params.flat import Piece
from phalanx.params.gather_full import gather_full
from phalanx.plan.complete import complete, usable_ranks
from phalanx.plan.plan import Plan
from phalanx.session import change as change_module
from phalanx.session.change import change, open_member
from phalanx.session.session import Opening, Session
from phalanx.session.spare import Member
from tests.captured import Case, named

LR, SAMPLES = 1e-2, 8


@dataclass(frozen=True)
class Trained:
    """losses: one per step. values: of parameters and of the optimizer's state, on rank 0."""

    losses: list[float]
    values: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    bytes: list[int] = field(default_factory=list[int])
    refused: list[str] = field(default_factory=list[str])
    traces: list[str] = field(default_factory=list[str])


def case(name: str) -> Case:
    return named(name, samples=SAMPLES, tokens=8)


def opened(context: RankContext, of: Case, plan: str, frozen: str = "", **options: Any) -> Member:
    """frozen: a part of the names of parameters that are not trained."""
    config = RunConfig.create(
        **{"dtype": "float64", "compile": "off", "batch_size": SAMPLES, "device": "cpu", **options}
    )
    values = of.parameters

    def read(name: str, is_master: bool, piece: Piece) -> Tensor:
        return piece.of(values[name].float() if is_master else values[name])

    trainable = tuple(name for name in of.captured.trainable if frozen not in name) if frozen else of.captured.trainable
    opening = Opening(of.captured, config, context, tuple(trainable), of.captured.buffers)
    return open_member(opening, planned(of, plan, context, config.slot), read)


def planned(of: Case, plan: str, context: RankContext, slot: int | None = None) -> Plan:
    """slot: samples of every micro-batch of a run that is deterministic."""
    world, costs = usable_ranks(plan, context.world), of.blocks.flops(of.captured.dims(of.batch))
    return complete(plan, world=world, batch_size=SAMPLES, costs=costs, slot=slot).plan


def train(
    context: RankContext, name: str, plans: Sequence[str], steps: int = 1, may_refuse: bool = False, **options: Any
) -> Trained:
    """So many steps under each plan in turn; may_refuse: or under the one before, where it is refused."""
    of, slot = case(name), options.get("slot_size")
    member = opened(context, of, plans[0], **options)
    losses, moved, refused = list[float](), list[int](), list[str]()
    for number, plan in enumerate(plans):
        try:
            if number:
                member, done = change(member, planned(of, plan, context, slot))
                moved.append(done.bytes)
        except ChangeRefused as error:
            if not may_refuse:
                raise
            refused.append(str(error))
        losses += [step(member, of, number * steps + each) for each in range(steps)]
    return ended(member, context, losses, moved, refused)


def step(member: Member, of: Case, number: int) -> float:
    """Every step has another place in the stream, and so other dropout."""
    if not isinstance(member, Session):
        return member.step(0).read()[0]
    first = number * SAMPLES
    begin, count = member.part(first, SAMPLES)
    batch = {name: tensor[begin - first : begin - first + count] for name, tensor in of.batch.items()}
    return member.step(batch, begin, LR).read()[0]


def ended(
    member: Member, context: RankContext, losses: list[float], moved: list[int], refused: Sequence[str] = (),
    traces: Sequence[str] = (),
) -> Trained:  # fmt: skip
    values = gathered(member, context, "end")
    member.close()
    return Trained(losses, values, moved, list(refused), list(traces))


def gathered(member: Member, context: RankContext, name: str) -> dict[str, Tensor]:
    """All state on rank 0."""
    layout = member.state.layout
    whole = {rank: layout.state(rank) for rank in range(member.plan.world)}
    pieces = sorted_like(whole.get(context.rank, ()), list(member.state.shards()))
    found = gather_full(whole, pieces, context, torch.device("cpu"), name)
    return {name: tensor.clone() for name, tensor in found}


def bits(context: RankContext, name: str, plans: Sequence[str], dtype: str, frozen: str) -> list[str]:
    """The tensors that a change does not leave as they were, on rank 0; after every one the model still trains."""
    of = case(name)
    member = opened(context, of, plans[0], dtype=dtype, frozen=frozen)
    wrong: list[str] = []
    for number, plan in enumerate(plans[1:]):
        assert step(member, of, number) > 0
        before = gathered(member, context, f"before{number}")
        member, _ = change(member, planned(of, plan, context))
        after = gathered(member, context, f"after{number}")
        assert before.keys() == after.keys() and (before or context.rank)
        wrong += [f"{plan}: {each}" for each in before if not torch.equal(before[each], after[each])]
    assert step(member, of, len(plans)) > 0
    member.close()
    return wrong


def sorted_like(shards: Sequence[Any], pieces: Sequence[Any]) -> list[Any]:
    by_name = {shard.name: (shard, data) for shard, data in pieces}
    return [by_name[shard.name] for shard in shards]


def train_with_failure(context: RankContext, name: str, plans: Sequence[str], failing: str, at: int) -> Trained:
    """As `train`; the second change fails on rank 1, where something is done for the `at`th time, and is tried again
    after a step."""
    of = case(name)
    member = opened(context, of, plans[0])
    losses, moved, refused, traces = [step(member, of, 0)], list[int](), list[str](), list[str]()
    number = 1
    for count, plan in enumerate(plans[1:], start=1):
        fails = _broken(failing, at, context.rank == 1) if count == 2 else contextlib.nullcontext()
        try:
            with fails:
                member, done = change(member, planned(of, plan, context))
            moved.append(done.bytes)
        except ChangeRefused as error:
            refused.append(str(error))
            traces.append(error.traceback)
            losses.append(step(member, of, number))
            number += 1
            member, done = change(member, planned(of, plan, context))
        losses.append(step(member, of, number))
        number += 1
    return ended(member, context, losses, moved, refused, traces)


@contextlib.contextmanager
def _broken(failing: str, at: int, here: bool) -> Iterator[None]:
    """On this rank something fails, where its `at`th call comes. While state moves every bucket is a portion, so that
    some have moved by then."""
    owner, name, breaks = _BREAKING[failing]
    calls, whole = [0], getattr(owner, name)

    def broken(self: Any, *arguments: Any, **options: Any) -> Any:
        return breaks(lambda: whole(self, *arguments, **options), calls, at, self, arguments)

    with pytest.MonkeyPatch.context() as patch:
        if owner in (_Stream, Staging, Message):
            patch.setattr(portions, "PORTION_BYTES", 0)
        if here:
            patch.setattr(owner, name, broken)
        yield


def _raising(error: Exception, always: bool = False) -> Any:
    def breaks(call: Any, calls: list[int], at: int, *_: Any) -> Any:
        calls[0] += 1
        if calls[0] == at or (always and calls[0] > at):
            raise error
        return call()

    return breaks


def _damaged(call: Any, calls: list[int], at: int, message: Any, arguments: Any) -> None:
    """A message on its way from this rank."""
    call()
    calls[0] += bool(message.moves)
    if message.moves and calls[0] == at:
        arguments[0][-1] += 1  # the buffer


_NO_ROOM = RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")
_BREAKING: dict[str, tuple[Any, str, Any]] = {
    "room": (_Stream, "_room", _raising(_NO_ROOM)),
    "room from then on": (_Stream, "_room", _raising(_NO_ROOM, always=True)),
    "room for messages": (Staging, "make_room", _raising(_NO_ROOM)),
    "message": (Message, "pack", _damaged),
    "compile": (Opening, "compile", _raising(RuntimeError("ptxas died\nwith a long dump"))),
    "connect": (Links, "_connect", _raising(LinkError("rank 1 could not connect to rank 0: refused", "look at it"))),
    "listen": (Links, "_connect", _raising(OSError("no more files"))),
    "state": (Opening, "state", _raising(RuntimeError("the optimizer broke"))),
    "moves": (change_module, "plan_migration", _raising(KeyError("wte"))),
}
