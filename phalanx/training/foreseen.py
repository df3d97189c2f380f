"""What a plan that is to come needs besides state, made by a thread while the plan before it still trains: functions,
programs, and the moves that lead there.

Only time is saved: whoever changes the plan finds these among what was made before, or makes them.
"""

from __future__ import annotations

import threading

import torch

from phalanx.engine.compiled import Compiled
from phalanx.params.layout_of import StateLayout
from phalanx.plan.plan import Plan
from phalanx.tasks.base import Batch
from phalanx.training.budget import Fit
from phalanx.training.change import migration_between
from phalanx.training.session import Opening


class Foreseen:
    """opening: of the sessions of this rank, which remembers what is made. now: the layout that state has. batch: a
    global one, whose shapes functions are made for."""

    def __init__(self, opening: Opening, now: StateLayout, plan: Plan, batch: Batch) -> None:
        self.plan, self._batch = plan, batch
        self.problem: Exception | None = None
        self._thread = threading.Thread(target=self._make, args=(opening, now), name="plan-ahead", daemon=True)
        self._thread.start()

    def wait(self) -> Plan | None:
        """Until the thread has ended. The plan, if all was made."""
        self._thread.join()
        return self.plan if self.problem is None else None

    def _make(self, opening: Opening, now: StateLayout) -> None:
        try:
            if opening.device.type == "cuda":
                torch.cuda.set_device(opening.device)  # a thread begins with the first
            if opening.has_place(self.plan):
                compiled = opening.remembered(self.plan)
                Fit(
                    compiled, opening.compile, self._part, opening.config.batch_size
                )  # whoever predicts makes functions
                new = compiled.formation.state
            else:
                new = opening.layout(self.plan)
            migration_between(opening, now, new, now.expected_slots)
        except Exception as error:  # whoever changes the plan meets it again, and says so
            self.problem = error

    def _part(self, compiled: Compiled) -> tuple[Batch, int]:
        first, count = compiled.part(0, len(next(iter(self._batch.values()))))
        return {name: tensor[first : first + count] for name, tensor in self._batch.items()}, first
