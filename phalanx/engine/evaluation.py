"""The loss on data that is not trained on: a forward-only program, with dropout off and nothing kept."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from phalanx.data.batches import Batches
from phalanx.engine.engine import Engine
from phalanx.engine.inputs import Feeder, Inputs, num_samples, split
from phalanx.engine.layout import ProcessGroups, RankLayout
from phalanx.engine.reductions import StepRun, number, total_items, total_loss
from phalanx.program.compile import compile_forward
from phalanx.program.instructions import Program
from phalanx.tasks.base import Batch


class Evaluator:
    """size: samples in a micro-batch."""

    def __init__(
        self, engine: Engine, feeder: Feeder, formation: RankLayout, connections: ProcessGroups, size: int
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
        exactly = self._formation.plan.sums_exactly
        none = torch.zeros((), dtype=torch.float64, device=self.engine.compute.device)
        sums = torch.cat([total_loss((), none, exactly), none.view(1)])
        for begin in range(0, rounds, self._formation.plan.mb):
            turns = [mine + dp * turn for turn in range(begin, min(begin + self._formation.plan.mb, rounds))]
            parts = [self._part(i, batches, starts[t] if t < len(starts) else 0, samples) for i, t in enumerate(turns)]
            counted = [i for i, turn in enumerate(turns) if turn < len(starts)]
            items = total_items([parts[i] for i in counted]) if counted else None
            losses = self._forward(parts, counted)
            if losses and items is not None:
                sums += torch.cat([total_loss(losses, items, exactly), items.view(1)])
            self.engine.settle()  # else what was sent would stay until the end
        self._connections.world.all_reduce(sums).wait("the evaluation's loss")
        self._connections.world.confirm(sums, "the evaluation's loss")
        loss, items = number(sums[:-1]).item(), sums[-1].item()
        return loss / items if items else float("nan")

    @torch.no_grad()
    def forward(self, batch: Batch, first: int) -> None:
        """This rank's part of the samples, for what the model does besides computing a loss."""
        parts = self._feeder(batch, first, split(num_samples(batch), self._formation.plan.mb))
        self._forward(parts, ())
        self.engine.settle()

    def _part(self, number: int, batches: Batches, start: int, samples: int) -> Inputs:
        count, plan = min(self._size, samples - start), self._formation.plan

        def edges(_: int, tokens: int) -> Sequence[int]:
            return plan.slice_bounds(number, tokens)

        return self._feeder(batches.batch(start, count), start, [count], edges if plan.slices else None)[0]

    def _forward(self, parts: Sequence[Inputs], counted: Sequence[int]) -> list[Tensor]:
        """The losses of those micro-batches that count, where this rank has them."""
        step = StepRun({(number, 0): part for number, part in enumerate(parts)}, lr=0.0)
        self.engine.run(self._program(len(parts)), step)
        values = zip(step.linked.table.values, step.values)
        return [loss for value, loss in values if value.kind == "loss" and value.micro_batch in counted]

    def _program(self, num_micro_batches: int) -> Program:
        if num_micro_batches not in self._programs:
            formation = self._formation
            compiled = compile_forward(formation.plan, formation.shape, num_micro_batches)
            self._programs[num_micro_batches] = compiled.program(formation.rank)
        return self._programs[num_micro_batches]
