"""What ranks do in tests of interrupted steps."""

from __future__ import annotations

import json
import math
from typing import Any

import torch
from torch import Tensor

from phalanx.engine.reductions import GlobalReductions, StepRun
from phalanx.errors import LinkError
from phalanx.launch.context import RankContext
from phalanx.session.held import hold
from phalanx.session.mirroring import begin_mirroring
from phalanx.session.session import Session
from tests.adapt.jobs import case, opened, step

Mirrors = tuple[dict[str, Tensor], int, dict[str, Tensor]]  # own state, the rank that is mirrored, its state


def interrupted(context: RankContext, plan: str, where: str) -> tuple[int, dict[str, Tensor]]:
    """Two steps; in the second one rank 1 loses its links where the sums of NORM are there already ("after"), or all
    ranks before they are ("before"). How many steps count here, and what this rank has then."""
    of = case("gpt2")
    member = opened(context, of, plan)
    assert isinstance(member, Session)
    member.step.number = 1
    step(member, of, 0)
    member.step.number = 2
    whole = GlobalReductions.found

    def found(self: GlobalReductions, run: StepRun, sums: Tensor) -> Tensor:
        if where == "before" or context.rank == 1:
            raise LinkError("a rank was lost")
        return whole(self, run, sums)

    GlobalReductions.found = found  # pyright: ignore[reportAttributeAccessIssue]
    try:
        step(member, of, 1)
        context.store.get("lost")  # rank 1 has gone by now, and so do the others
    except LinkError:
        context.store.set("lost", "yes")
    finally:
        GlobalReductions.found = whole  # pyright: ignore[reportAttributeAccessIssue]
    held = hold(member, 2)
    assert held is not None
    if held.sums is not None and context.rank == 0:
        context.store.set("sums", json.dumps(held.sums))
    if where == "after" and context.rank == 1:
        assert held.stepping is not None and held.step == 1
        assert held.complete(json.loads(context.store.get("sums")))
    return held.step, {shard.name: data.clone() for filled in held.filled() for shard, data in filled}


def made(context: RankContext, plan: str, steps: int) -> tuple[int, dict[str, Tensor]]:
    """The same without any loss."""
    of = case("gpt2")
    member = opened(context, of, plan)
    assert isinstance(member, Session)
    for number in range(steps):
        step(member, of, number)
    values = {shard.name: data.clone() for shard, data in member.state.shards()}
    member.close()
    return steps, values


def mirrored(context: RankContext, plan: str, steps: int, infinite: int, options: dict[str, Any]) -> Mirrors:
    """What a rank has after so many steps, and what it mirrors, by the same names. infinite: a step whose gradients
    are not finite."""
    of = case("gpt2")
    member = opened(context, of, plan, **options)
    assert isinstance(member, Session)
    mirroring, _ = begin_mirroring(member, 0, on_trial=False)
    assert mirroring is not None
    member.step.mirroring = mirroring
    whole = GlobalReductions.found

    def found(self: GlobalReductions, run: StepRun, sums: Tensor) -> Tensor:
        return whole(self, run, sums * math.inf)

    for number in range(steps):
        GlobalReductions.found = found if number == infinite else whole  # pyright: ignore[reportAttributeAccessIssue]
        step(member, of, number)
    GlobalReductions.found = whole  # pyright: ignore[reportAttributeAccessIssue]
    mirroring.close()
    assert mirroring.step == steps and mirroring.is_sound and mirroring.kept.is_sound
    own, kept = ({shard.name: data.clone() for shard, data in each.shards()} for each in (member.state, mirroring.kept))
    member.close()
    return own, mirroring.kept.rank, kept


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
