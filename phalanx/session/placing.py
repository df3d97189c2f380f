"""State in its place under a plan: on which device each tensor is to lie, whether it lies so already, and what a rank
trains with made of what came to it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from phalanx.adapt.migrate import Arrived, Home, StateLost, first_line
from phalanx.adapt.portions import parameter_of
from phalanx.engine.compiled import Compiled
from phalanx.params.flat import Piece
from phalanx.params.layout_of import StateLayout
from phalanx.params.rank_state import State
from phalanx.session.session import Opening


def same_place(old: StateLayout, was: int, new: StateLayout, now: int) -> bool:
    """Whether a rank keeps the same in the same way under two plans. was, now: its number."""
    return (
        old.facts == new.facts
        and old.buckets(was) == new.buckets(now)
        and old.sharding(was) == new.sharding(now)
        and list(old.kept(was)) == list(new.kept(now))
        and old.plan.steps_on_host == new.plan.steps_on_host
    )


def homes(opening: Opening, compiled: Compiled | None) -> Home:
    """Where the tensors of a rank's state are to lie."""
    hosted = _named(compiled, compiled.hosted()) if compiled is not None else set[str]()
    fetched = _named(compiled, compiled.fetched()) if compiled is not None else set[str]()

    def home(name: str) -> torch.device:
        is_hosted = parameter_of(name) in (fetched if name.startswith("model/") else hosted)
        return torch.device("cpu") if is_hosted else opening.device

    return home


def _named(compiled: Compiled, buckets: Iterable[int]) -> set[str]:
    """The parameters of some buckets."""
    facts = compiled.formation.facts
    return {each.name for bucket in buckets for each in facts.buckets.get(bucket, ())}


def made(
    opening: Opening, compiled: Compiled, arrived: Arrived, optimizer: dict[str, Any],
    loss_scale: dict[str, float] | None,
) -> State:  # fmt: skip
    """Of what it is made, nothing is left: where it cannot be, this rank ends. Parameters that are whole on a rank and
    came in shards are still to be collected."""

    def read(name: str, is_master: bool, piece: Piece) -> Tensor:
        return piece.read(arrived, f"{'master' if is_master else 'model'}/{name}")

    try:
        state = opening.state(compiled, read, only_shards=True)
        state.restore(arrived, optimizer, loss_scale)
    except Exception as error:
        if opening.config.on_loss != "stop" and opening.context.membership is not None:
            raise  # to the others this rank is lost like one that crashed, and they go on; what is refused ends all
        what = f"what had moved cannot be put in place under plan {compiled.plan.shown}"
        raise StateLost(f"{what}: {first_line(error)}") from error
    return state
