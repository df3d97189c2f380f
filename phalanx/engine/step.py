"""One step on one rank: its part of the batch is cut into micro-batches, and the program is run on them.

Nothing here reads a result from the device; `Outcome.read` does, whenever the caller wants it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.comm.links import Group
from phalanx.engine.engine import Engine
from phalanx.engine.inputs import Feeder, Inputs, num_samples, split
from phalanx.engine.mirroring import Mirroring
from phalanx.engine.reductions import Place, StepRun
from phalanx.errors import LateError
from phalanx.model.captured import Captured
from phalanx.plan.plan import Plan
from phalanx.program.instructions import Program
from phalanx.program.lower import end_of_gradients
from phalanx.tasks.base import Batch


@dataclass(frozen=True)
class Outcome:
    """What a step gave, perhaps still on its way from the device."""

    # Loss, gradient norm, 1 if the update was made, ranks asked to stop and for another plan, what was counted over all
    values: Tensor
    arrived: torch.cuda.Event | None
    timeout: float | None = None  # seconds for others to do their part, where there are any

    @classmethod
    def of(cls, step: StepRun, told: Group | None = None, timeout: float | None = None) -> Outcome:
        """told: this rank and those that have no place in the plan, which learn it too."""
        assert step.loss is not None and step.norm is not None and step.updated is not None
        values = torch.stack([step.loss, step.norm, step.updated.double(), *step.counted])
        if told is not None:
            told.broadcast(values, told.ranks[0]).wait("what a step gave")
        return cls.from_device(values, timeout)

    @classmethod
    def elsewhere(cls, told: Group, num_counts: int, device: torch.device) -> Outcome:
        """What a step gave, on a rank that has no place in the plan."""
        values = torch.zeros(5 + num_counts, dtype=torch.float64, device=device)
        told.broadcast(values, told.ranks[0]).wait("what a step gave")
        told.confirm(values, "what a step gave")
        return cls.from_device(values)

    @classmethod
    def from_device(cls, values: Tensor, timeout: float | None = None) -> Outcome:
        if values.device.type != "cuda":
            return cls(values, None)
        on_host = torch.empty(values.shape, dtype=torch.float64, pin_memory=True)
        on_host.copy_(values, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        return cls(on_host, arrived, timeout)

    def read(self) -> tuple[float, float, bool]:
        """Loss, gradient norm, and whether the update was made; waits for the device."""
        began = time.monotonic()
        while self.arrived is not None and not self.arrived.query():  # a rank that waits for a dead one can be stopped
            if self.timeout is not None and (seconds := time.monotonic() - began) > self.timeout:
                raise LateError(
                    f"a step did not end in {seconds:.0f} s, though no rank was lost",
                    "a connection or a device may stand still; steps that take longer need a longer timeout",
                )
            time.sleep(1e-4)
        loss, norm, updated = self.values[:3].tolist()
        return loss, norm, bool(updated)

    def stops(self) -> bool:
        """Whether any rank was asked to stop by the end of this step; all ranks get the same answer."""
        self.read()
        return bool(self.values[3])

    def changes(self) -> bool:
        """Whether any rank was asked for another plan by the end of this step; all ranks get the same answer."""
        self.read()
        return bool(self.values[4])

    def counted(self) -> list[float]:
        """The sums over all parts of the batch of what each rank was given to count."""
        self.read()
        return self.values[5:].tolist()


class Step:
    """The training step of a plan on this rank."""

    def __init__(
        self, feeder: Feeder, engine: Engine, program: Program, plan: Plan, told: Group | None = None,
        timeout: float | None = None,
    ) -> None:  # fmt: skip
        self.feeder, self.engine, self.program, self._plan, self._told = feeder, engine, program, plan, told
        self._timeout = timeout
        self.commits = False  # whether a rank must know, before it updates, that all others can
        self.mirroring: Mirroring | None = None  # what others hold alone
        self.run: StepRun | None = None  # the newest, made or interrupted
        self.number, self.run_number = 0, 0  # of the step to come, as the caller counts; of `run`

    def __call__(
        self, batch: Batch, first: int, lr: float, counts: Sequence[float] = (),
        stop: Callable[[], bool] | None = None, change: Callable[[], bool] | None = None,
        most_loss: float | None = None,
    ) -> Outcome:  # fmt: skip
        """Trains on this rank's part of the samples, which stand at stream positions from `first` on.

        counts: numbers about this part of the batch, to be summed over all parts. stop: whether this
        rank is asked to stop, asked when the step ends; change: whether it is asked for another plan. most_loss: with a
        larger loss, nothing is updated.
        """
        step = self.begin(batch, first, lr)
        step.most_loss = most_loss
        step.counts, step.stop, step.change = tuple(counts), stop or step.stop, change or step.change
        self.run, self.run_number, step.commits = step, self.number, self.commits
        step.mirroring = self.mirroring
        self.engine.run(self.program, step)
        return Outcome.of(step, self._told, self._timeout)

    def complete(self, sums: Sequence[float]) -> Outcome:
        """Ends the step that was interrupted (`Engine.complete`)."""
        assert self.run is not None and self.run.items is not None
        found = torch.tensor(list(sums), dtype=torch.float64, device=self.run.items.device)
        self.engine.complete(self.run, found)
        return Outcome.of(self.run)

    def backward(self, batch: Batch, first: int) -> StepRun:
        """The part of the program that makes gradients; they are there until the run is abandoned."""
        run = self.begin(batch, first, lr=None)
        self.engine.run(self.program, run, until=end_of_gradients(self.program))
        return run

    def update(self, before: StepRun, gradients: Mapping[str, Tensor], norm: Tensor) -> Tensor:
        """The part that updates, by these gradients; whether it did. before: a run of the other part, abandoned or
        not. norm: a number that is finite if all gradients are."""
        run = StepRun({}, lr=None, gradients=dict(gradients), norm=norm, loss=before.loss, unscaled=True)
        self.engine.enter(run, before.linked, end_of_gradients(self.program))
        self.engine.run(self.program, run)
        assert run.updated is not None
        return run.updated

    def begin(self, batch: Batch, first: int, lr: float | None) -> StepRun:
        return StepRun(micro_batches(self.feeder, self._plan, batch, first), lr)


def micro_batches(feeder: Feeder, plan: Plan, batch: Batch, first: int) -> dict[Place, Inputs]:
    """A rank's part of a batch as the plan cuts it."""
    sizes = [half for size in split(num_samples(batch), plan.mb) for half in split(size, plan.halves)]

    def edges(number: int, tokens: int) -> Sequence[int]:
        return plan.slice_bounds(number // plan.halves, tokens)

    parts = feeder(batch, first, sizes, edges if plan.slices else None)
    return {divmod(number, plan.halves): part for number, part in enumerate(parts)}


def training_flops(captured: Captured, batch: Batch, sizes: Sequence[int]) -> float:
    """Floating-point operations of one step: a backward costs twice its forward."""
    total = 0
    for size in set(sizes):
        dims = captured.dims({name: tensor[:size] for name, tensor in batch.items()})
        forward = sum(captured.blocks.flops(dims))
        total += 3 * forward * list(sizes).count(size)
    return float(total)
