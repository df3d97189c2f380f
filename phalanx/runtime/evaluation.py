"""The loss on data that is not trained on: a forward-only program, with dropout off and nothing kept."""

from __future__ import annotations

import torch

from phalanx.data import Batches
from phalanx.model.slicing import TOKENS
from phalanx.program.check import check_forward
from phalanx.program.instructions import Program
from phalanx.program.lower import lower_forward
from phalanx.runtime.engine import Engine
from phalanx.runtime.formation import Connections, Formation
from phalanx.runtime.micro_batch import MicroBatch, Place
from phalanx.runtime.step import Feeder
from phalanx.runtime.totals import StepRun, total_items, total_loss


class Evaluator:
    """size: samples in a micro-batch."""

    def __init__(
        self, engine: Engine, feeder: Feeder, formation: Formation, connections: Connections, size: int
    ) -> None:
        self.engine, self._feeder, self._formation = engine, feeder, formation
        self._connections, self._size = connections, size
        self._programs: dict[int, Program] = {}

    @torch.no_grad()
    def __call__(self, batches: Batches, samples: int) -> float:
        """The mean loss per item over the first `samples` samples.

        Replicas take micro-batches in turn. All run equally many, because some of their communication is common; one
        that comes too late to have a share runs the first micro-batch again and does not count it.
        """
        starts = range(0, samples, self._size)
        dp, mine = self._formation.plan.dp, self._formation.dp_index
        rounds = -(-len(starts) // dp)
        sums = torch.zeros(2, dtype=torch.float64, device=self.engine.compute.device)
        for begin in range(0, rounds, self._formation.plan.mb):
            turns = [mine + dp * turn for turn in range(begin, min(begin + self._formation.plan.mb, rounds))]
            step = self._forward(batches, [starts[turn] if turn < len(starts) else 0 for turn in turns], samples)
            last = len([turn for turn in turns if turn < len(starts)])
            counted = [step.batches[part] for place, part in step.places.items() if place[0] < last]
            if counted and counted[0].loss is not None:
                items = total_items(counted, self._feeder.captured.blocks.count)
                sums += torch.stack([total_loss(counted, items), items])
            self.engine.settle()  # else what was sent would stay until the end
        self._connections.world.all_reduce(sums).wait("the evaluation's loss")
        loss, items = sums.tolist()
        return loss / items if items else float("nan")

    def _forward(self, batches: Batches, starts: list[int], samples: int) -> StepRun:
        parts: list[MicroBatch] = []
        places: dict[Place, int] = {}
        for number, start in enumerate(starts):
            count = min(self._size, samples - start)
            [whole] = self._feeder.micro_batches(batches.batch(start, count), start, [count])
            for index, part in enumerate(self._feeder.slices(whole, self._edges(number, whole))):
                places[number, index, 0] = len(parts)
                parts.append(part)
        step = StepRun(parts, lr=0.0, places=places)
        self.engine.run(self._program(len(starts)), step)
        return step

    def _edges(self, number: int, whole: MicroBatch) -> tuple[int, ...] | None:
        plan = self._formation.plan
        return plan.slice_bounds(number, whole.dims[TOKENS]) if plan.slices else None

    def _program(self, num_micro_batches: int) -> Program:
        if num_micro_batches not in self._programs:
            formation = self._formation
            programs = lower_forward(formation.plan, formation.shape, num_micro_batches)
            check_forward(formation.plan, formation.shape, programs, num_micro_batches)
            self._programs[num_micro_batches] = programs[formation.rank]
            self.engine.learn(programs[formation.rank])
        return self._programs[num_micro_batches]
