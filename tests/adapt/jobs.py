"""What ranks do in tests of changes of plan: train tiny models, changing the plan between steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from phalanx.config import RunConfig
from phalanx.launch.context import RankContext
from phalanx.params.flat import Piece
from phalanx.params.gather_full import gather_full
from phalanx.plan.complete import complete
from phalanx.training.change import Member, change, open_member
from phalanx.training.session import Opening, Session
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


def opened(context: RankContext, of: Case, plan: str, **options: Any) -> Member:
    config = RunConfig.create(
        **{"dtype": "float64", "compile": "off", "batch_size": SAMPLES, "device": "cpu", **options}
    )
    values = of.parameters

    def read(name: str, is_master: bool, piece: Piece) -> Tensor:
        return piece.of(values[name].float() if is_master else values[name])

    opening = Opening(of.captured, config, context, tuple(of.captured.trainable), of.captured.buffers)
    return open_member(opening, planned(of, plan, context), read)


def planned(of: Case, plan: str, context: RankContext):
    world = plan_world(plan, context.world)
    return complete(plan, world=world, batch_size=SAMPLES, costs=of.blocks.flops(of.captured.dims(of.batch))).plan


def plan_world(plan: str, world: int) -> int:
    from phalanx.plan.complete import usable_ranks

    return usable_ranks(plan, world)


def train(context: RankContext, name: str, plans: Sequence[str], steps: int = 1, **options: Any) -> Trained:
    """So many steps under each plan in turn."""
    of = case(name)
    member = opened(context, of, plans[0], **options)
    losses: list[float] = []
    moved: list[int] = []
    for number, plan in enumerate(plans):
        if number:
            member, done = change(member, planned(of, plan, context))
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
    """All state, gathered on rank 0."""
    layout = member.state.layout if isinstance(member, Session) else member.opening.layout(member.plan)
    pieces = list(member.state.shards()) if isinstance(member, Session) else []
    whole = {rank: layout.state(rank) if rank < member.plan.world else () for rank in range(context.world)}
    values = {
        n: t.clone()
        for n, t in gather_full(whole, sorted_like(whole[context.rank], pieces), context, torch.device("cpu"))
    }
    member.close()
    return Trained(losses, values, moved, list(refused))


def sorted_like(shards: Sequence[Any], pieces: Sequence[Any]) -> list[Any]:
    by_name = {shard.name: (shard, data) for shard, data in pieces}
    return [by_name[shard.name] for shard in shards]
