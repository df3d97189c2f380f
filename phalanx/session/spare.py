"""A rank that has no place in the plan: it keeps nothing, waits, learns what every step gave, and takes part again when
the plan changes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from phalanx.adapt.holdings import Moving
from phalanx.comm.links import Links
from phalanx.data.batches import Batches
from phalanx.engine.step import Outcome
from phalanx.params.layout_of import KeptSlot, StateLayout
from phalanx.params.rank_state import Filled, State
from phalanx.plan.plan import Plan
from phalanx.session.session import Opening, Session


class NoState:
    """What a rank without a place keeps. layout: of the others."""

    def __init__(self, plan: Plan, opening: Opening) -> None:
        self._plan, self._opening = plan, opening

    @cached_property
    def layout(self) -> StateLayout:
        return self._opening.layout(self._plan)

    def settle(self) -> None:
        """Nothing is on its way."""

    def shards(self) -> Iterator[Filled]:
        return iter(())

    def values(self) -> Iterator[Filled]:
        return iter(())

    def tensors(self) -> Iterator[Tensor]:
        return iter(())

    def kept_slots(self) -> Iterator[tuple[str, KeptSlot]]:
        return iter(())

    def scalars(self) -> tuple[dict[str, Any], dict[str, float] | None]:
        return {}, None


class Spare:
    """What the others' `Session` is, as far as the loop needs it. left: what it gets while the plan changes."""

    left: State | Moving | None = None

    def __init__(self, plan: Plan, opening: Opening, links: Links) -> None:
        told = opening.told(links, plan)
        assert told is not None and not opening.has_place(plan)
        self.plan, self.opening, self.links, self.told = plan, opening, links, told
        self.state = NoState(plan, opening)

    def step(self, num_counts: int) -> Outcome:
        return Outcome.elsewhere(self.told, num_counts, self.opening.device)

    def evaluate(self, batches: Batches, samples: int) -> float:
        loss = torch.zeros((), dtype=torch.float64, device=self.opening.device)
        self.told.broadcast(loss, self.told.ranks[0]).wait("the evaluation's loss")
        return float(loss)

    def close(self) -> None:
        self.links.close()


Member = Session | Spare  # what a rank is in a job
