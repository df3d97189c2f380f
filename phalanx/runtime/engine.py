"""Runs a lowered program, and does nothing that it was not told to.

The engine knows which object carries out which instruction, and what flows between the stages of one rank. It orders
nothing: a computation waits for what it needs, everything else is started where it stands in the program.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch

from phalanx.plan.plan import Plan
from phalanx.program.instructions import Instruction, Op
from phalanx.program.shape import ModelShape
from phalanx.runtime.accumulate import Gradients
from phalanx.runtime.compute import Compute
from phalanx.runtime.messages import Messages
from phalanx.runtime.micro_batch import MicroBatch, StageRun
from phalanx.runtime.parameters import Parameters
from phalanx.runtime.totals import StepRun, Totals
from phalanx.runtime.warm_up import WarmUp


class Watch(Protocol):
    """Told of every instruction before and after it runs (a board for the supervisor, a timeline); and of a
    computation, in between, when it has everything that it waited for."""

    def begin(self, instruction: Instruction) -> None: ...

    def ready(self, instruction: Instruction) -> None: ...

    def end(self, instruction: Instruction) -> None: ...


class Engine:
    """One rank's executor. Without `totals` it only runs forwards, and keeps nothing for a backward."""

    def __init__(
        self,
        plan: Plan,
        shape: ModelShape,
        compute: Compute,
        parameters: Parameters,
        *,
        messages: Messages | None = None,
        gradients: Gradients | None = None,
        totals: Totals | None = None,
        watches: Iterable[Watch] = (),
        warm_up: WarmUp | None = None,
    ) -> None:
        self.compute, self.parameters, self.watches = compute, parameters, list(watches)
        self._plan, self._messages, self._totals, self._warm_up = plan, messages, totals, warm_up
        self._gradients = gradients or Gradients({}, {})
        self._buckets = [shape.buckets(block) for block in range(shape.num_blocks)]
        self._blocks = [plan.stage_blocks(stage) for stage in range(plan.num_stages)]
        self._crossing = [compute.blocks.crossing(blocks[0]) for blocks in self._blocks]
        self._done_with = [self._last_uses(stage) for stage in range(plan.num_stages)]
        self.executed: Counter[str] = Counter()
        self._actions = self._make_actions()

    def run(self, program: Sequence[Instruction], step: StepRun) -> None:
        """Runs the instructions in order. May be called with one part of a program after the other."""
        if self._warm_up is not None:
            self._warm_up(program, step.batches)
        with torch.no_grad():
            for instruction in program:
                for watch in self.watches:
                    watch.begin(instruction)
                self._actions[instruction.op](instruction, step)
                for watch in self.watches:
                    watch.end(instruction)
                self.executed[str(instruction.op)] += 1

    def settle(self) -> None:
        """Waits until nothing is on its way, in or out."""
        self.parameters.settle()
        if self._messages is not None:
            self._messages.settle()

    def _make_actions(self) -> dict[Op, Callable[[Instruction, StepRun], None]]:
        actions: dict[Op, Callable[[Instruction, StepRun], None]] = {
            Op.F: self._forward,
            Op.GATHER: lambda i, step: self.parameters.gather(_block(i)),
            Op.FREE: lambda i, step: self.parameters.free(_block(i)),
        }
        if messages := self._messages:
            actions |= {
                Op.SEND_F: lambda i, step: messages.send_forward(i, _batch(i, step)),
                Op.SEND_B: lambda i, step: messages.send_backward(i, _batch(i, step)),
                Op.RECV_F: lambda i, step: messages.post(i, _batch(i, step)),
                Op.RECV_B: lambda i, step: messages.post(i, _batch(i, step)),
            }
        if totals := self._totals:
            actions |= {
                Op.B: self._backward,
                Op.BW: self._backward,
                Op.W: self._weight,
                Op.REDUCE: lambda i, step: self._gradients.reduce(_block(i)),
                Op.TIE: lambda i, step: self._gradients.tie(_block(i)),
                Op.COUNT: lambda i, step: totals.count(step),
                Op.NORM: lambda i, step: totals.norm(step, self._gradients.finish()),
                Op.STEP: self._step,
                Op.SHARE: lambda i, step: self.parameters.share(_block(i)),
            }
        return actions

    def _forward(self, instruction: Instruction, step: StepRun) -> None:
        batch, run, stage, block = _place(instruction, step)
        if block == self._blocks[stage][0] and stage > 0:
            self._take_inputs(stage, _micro_batch(instruction), batch, run)
        self._have_parameters(instruction)
        self.compute.forward(block, batch, run, keep=self._totals is not None)
        for wire in self._done_with[stage].get(block, ()):
            del run.wires[wire]
        if block == len(self._buckets) - 1:
            batch.loss = run.wires.pop(self.compute.blocks.loss)

    def _backward(self, instruction: Instruction, step: StepRun) -> None:
        batch, run, stage, block = _place(instruction, step)
        if block == self._blocks[stage][-1]:
            self._take_gradients(stage, _micro_batch(instruction), batch, run, step)
        self._have_parameters(instruction)
        if instruction.op is Op.B:
            self.compute.backward(block, run)
        else:
            self._gradients.add(self._names(block), self.compute.backward_weight(block, run))

    def _weight(self, instruction: Instruction, step: StepRun) -> None:
        _, run, _, block = _place(instruction, step)
        self._have_parameters(instruction)
        self._gradients.add(self._names(block), self.compute.weight(block, run))

    def _step(self, instruction: Instruction, step: StepRun) -> None:
        assert self._totals is not None
        self._totals.step(step)
        self._gradients.release()
        if self._messages is not None:
            self._messages.settle()

    def _have_parameters(self, instruction: Instruction) -> None:
        """The last thing that a computation waits for."""
        self.parameters.ready(self._buckets[_block(instruction)])
        for watch in self.watches:
            watch.ready(instruction)

    def _take_inputs(self, stage: int, micro_batch: int, batch: MicroBatch, run: StageRun) -> None:
        """What the stage before left: by reference if it is on this rank, else by message."""
        if self._plan.pp_index(stage - 1) == self._plan.pp_index(stage):
            before = batch.stages[stage - 1]
            for wire in self._crossing[stage]:
                run.wires[wire], run.differentiable[wire] = before.wires.pop(wire), before.differentiable[wire]
        else:
            assert self._messages is not None
            self._messages.inputs(stage, micro_batch, run)

    def _take_gradients(
        self, stage: int, micro_batch: int, batch: MicroBatch, run: StageRun, step: StepRun
    ) -> None:  # fmt: skip
        """The gradients of what the stage put out; on the last stage that is the loss."""
        if stage == self._plan.num_stages - 1:
            assert batch.loss is not None and self._totals is not None, "forward comes before backward"
            run.gradients[self.compute.blocks.loss] = self._totals.scale(step).to(batch.loss.dtype)
        elif self._plan.pp_index(stage + 1) == self._plan.pp_index(stage):
            after = batch.stages[stage + 1].gradients
            run.gradients.update({wire: after.pop(wire) for wire in self._crossing[stage + 1] if wire in after})
        else:
            assert self._messages is not None
            self._messages.output_gradients(stage, micro_batch, run)

    def _last_uses(self, stage: int) -> dict[int, list[str]]:
        """Per block of a stage, the wires that nobody needs once it has run."""
        blocks = self.compute.blocks
        leaving = set(self._crossing[stage + 1]) if stage + 1 < self._plan.num_stages else {blocks.loss}
        last: dict[str, int] = {}
        for number in self._blocks[stage]:
            last |= dict.fromkeys((*blocks.blocks[number].outputs, *blocks.blocks[number].names("wire")), number)
        found: dict[int, list[str]] = {}
        for wire, number in last.items():
            if wire not in leaving:
                found.setdefault(number, []).append(wire)
        return found

    def _names(self, block: int) -> tuple[str, ...]:
        return self.compute.blocks.blocks[block].names("parameter")


def _place(instruction: Instruction, step: StepRun) -> tuple[MicroBatch, StageRun, int, int]:
    batch, stage = _batch(instruction, step), instruction.stage
    assert stage is not None
    return batch, batch.stage(stage), stage, _block(instruction)


def _batch(instruction: Instruction, step: StepRun) -> MicroBatch:
    return step.batches[_micro_batch(instruction)]


def _micro_batch(instruction: Instruction) -> int:
    assert instruction.micro_batch is not None
    return instruction.micro_batch


def _block(instruction: Instruction) -> int:
    assert instruction.block is not None
    return instruction.block
