"""A rank that has no place in the plan: it keeps nothing, waits, learns what every step gave, and takes part again when
the plan changes."""

from __future__ import annotations

import torch

from phalanx.comm.links import Links
from phalanx.data.batches import Batches
from phalanx.engine.step import Outcome
from phalanx.plan.plan import Plan
from phalanx.training.session import Opening


class Spare:
    """What the others' `Session` is, as far as the loop needs it."""

    def __init__(self, plan: Plan, opening: Opening, links: Links) -> None:
        told = opening.told(links, plan)
        assert told is not None and not opening.has_place(plan)
        self.plan, self.opening, self.links, self.told = plan, opening, links, told

    def step(self, num_counts: int) -> Outcome:
        return Outcome.elsewhere(self.told, num_counts, self.opening.device)

    def evaluate(self, batches: Batches, samples: int) -> float:
        loss = torch.zeros((), dtype=torch.float64, device=self.opening.device)
        self.told.broadcast(loss, self.told.ranks[0]).wait("the evaluation's loss")
        return float(loss)

    def close(self) -> None:
        self.links.close()
