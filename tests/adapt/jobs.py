"""What ranks do in tests of changes of plan: train tiny models, changing the plan between steps."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from phalanx.adapt import portions
from phalanx.adapt.exchange import Message
from phalanx.adapt.migrate import ChangeRefused, _Stream
from phalanx.config import RunConfig
from phalanx.launch.context import RankContext
from phalanx.params.flat import Piece
from phalanx.params.gather_full import gather_full
from phalanx.plan.complete import complete, usable_ranks
from phalanx.plan.plan import Plan
from phalanx.session.change import Member, change, open_member
from phalanx.session.session import Opening, Session
from tests.captured import Case, named

LR, SAMPLES = 1e-2, 8


@dataclass(frozen=True)
class Trained:
    """losses: one per step. values: of parameters and of the optimizer's state, on rank 0."""

    losses: list[float]
    values: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    bytes: list[int] = field(default_factory=list[int])
    refused: list[str] = field(default_factory=list[str])


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


def train(context: RankContext, name: str, plans: Sequence[str], steps: int = 1, **options: Any) -> Trained:
    """So many steps under each plan in turn."""
    of, slot = case(name), options.get("slot_size")
    member = opened(context, of, plans[0], **options)
    losses: list[float] = []
    moved: list[int] = []
    for number, plan in enumerate(plans):
        if number:
            member, done = change(member, planned(of, plan, context, slot))
            moved.append(done.bytes)
        losses += [step(member, of, number * steps + each) for each in range(steps)]
    return ended(member, context, losses, moved)


def step(member: Member, of: Case, number: int) -> float:
    """Every step has another place in the stream, and so other dropout."""
    if not isinstance(member, Session):
        return member.step(0).read()[0]
    first = number * SAMPLES
    begin, count = member.part(first, SAMPLES)
    batch = {name: tensor[begin - first : begin - first + count] for name, tensor in of.batch.items()}
    return member.step(batch, begin, LR).read()[0]


def ended(
    member: Member, context: RankContext, losses: list[float], moved: list[int], refused: Sequence[str] = ()
) -> Trained:
    values = gathered(member, context, "end")
    member.close()
    return Trained(losses, values, moved, list(refused))


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
    """As `train`; the second change fails on rank 1, in its portion number `at`, and is tried again after a step."""
    of = case(name)
    member = opened(context, of, plans[0])
    losses, moved, refused = [step(member, of, 0)], list[int](), list[str]()
    number = 1
    for count, plan in enumerate(plans[1:], start=1):
        fails = _broken(failing, at, context.rank == 1) if count == 2 else contextlib.nullcontext()
        try:
            with fails:
                member, done = change(member, planned(of, plan, context))
            moved.append(done.bytes)
        except ChangeRefused as error:
            refused.append(str(error))
            losses.append(step(member, of, number))
            number += 1
            member, done = change(member, planned(of, plan, context))
        losses.append(step(member, of, number))
        number += 1
    return ended(member, context, losses, moved, refused)


@contextlib.contextmanager
def _broken(failing: str, at: int, here: bool) -> Iterator[None]:
    """A message that is damaged on its way from this rank, or a portion for which it has no room. Every bucket is a
    portion, so that some have moved by then."""
    calls, usual, portions.PORTION_BYTES = [0], portions.PORTION_BYTES, 0
    name, kind = ("_room", _Stream) if failing == "room" else ("pack", Message)
    whole = getattr(kind, name)

    def broken(self: Any, *arguments: Any) -> Any:
        if failing == "room":
            calls[0] += 1
            if calls[0] == at:
                raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")
            return whole(self, *arguments)
        whole(self, *arguments)
        calls[0] += bool(self.moves)
        if self.moves and calls[0] == at:
            arguments[0][-1] += 1  # the buffer
        return None

    if here:
        setattr(kind, name, broken)
    try:
        yield
    finally:
        setattr(kind, name, whole)
        portions.PORTION_BYTES = usual
