"""Runs a lowered program, and does nothing that it was not told to.

The engine knows which object carries out which instruction, and what flows between the stages of one rank. It orders
nothing: a computation waits for what it needs, everything else is started where it stands in the program.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from typing import Protocol

import torch

from phalanx.params.parameters import Parameters
from phalanx.plan.plan import Plan
from phalanx.program.instructions import Instruction, Op, Program
from phalanx.program.shape import ModelShape
from phalanx.runtime.accumulate import Gradients
from phalanx.runtime.anatomy import Anatomy, Knowledge
from phalanx.runtime.compute import Compute
from phalanx.runtime.exchanges import Exchanges, add_gradient
from phalanx.runtime.messages import Messages
from phalanx.runtime.micro_batch import Arriving, MicroBatch, StageRun, place_of
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
        anatomy: Anatomy,
        compute: Compute,
        parameters: Parameters,
        *,
        exchanges: Exchanges | None = None,
        messages: Messages | None = None,
        gradients: Gradients | None = None,
        totals: Totals | None = None,
        watches: Iterable[Watch] = (),
        warm_up: WarmUp | None = None,
        whole: Collection[str] = (),
    ) -> None:
        self._whole = frozenset(whole)  # wires that are the same for all slices of a micro-batch
        self.compute, self.parameters, self.watches = compute, parameters, list(watches)
        self._plan, self._shape, self._anatomy = plan, shape, anatomy
        self._messages, self._totals, self._warm_up = messages, totals, warm_up
        self.exchanges = exchanges or Exchanges(())
        self._gradients = gradients or Gradients({}, {})
        self._buckets = [shape.buckets(block) for block in range(shape.num_blocks)]
        self._crossing = [anatomy.crossing(plan, stage) for stage in range(plan.num_stages)]
        self._known = Knowledge()
        self._unread: deque[Arriving] = deque()
        self.executed: Counter[str] = Counter()
        self._actions = self._make_actions()

    def learn(self, program: Program) -> None:
        """Called once with each program before it is run."""
        self._known.learn(program, self._plan, self._shape, self._anatomy)

    def run(self, program: Sequence[Instruction], step: StepRun) -> None:
        """Runs the instructions in order. May be called with one part of a program after the other."""
        if self._warm_up is not None:
            self._warm_up(program, step.batches)
        with torch.no_grad():
            for instruction in program:
                for watch in self.watches:
                    watch.begin(instruction)
                self._actions[instruction.op](instruction, step)
                self._drop(instruction, step)
                for watch in self.watches:
                    watch.end(instruction)
                self.executed[str(instruction.op)] += 1

    def settle(self) -> None:
        """Waits until nothing is on its way, in or out."""
        self.parameters.settle()
        self._forget_unread()
        if self._messages is not None:
            self._messages.settle()

    def _make_actions(self) -> dict[Op, Callable[[Instruction, StepRun], None]]:
        actions: dict[Op, Callable[[Instruction, StepRun], None]] = {
            Op.F: self._forward,
            Op.A: self._again,
            Op.CF: self._exchange,
            Op.CA: self._exchange,
            Op.CB: self._exchange_back,
            Op.GATHER: lambda i, step: self.parameters.gather(_block(i)),
            Op.FREE: lambda i, step: self.parameters.free(_block(i)),
        }
        if messages := self._messages:
            actions |= {
                Op.SEND_F: self._send_forward,
                Op.SEND_B: self._send_backward,
                Op.RECV_F: lambda i, step: messages.post(i, self._batch(i, step)),
                Op.RECV_B: lambda i, step: messages.post(i, self._batch(i, step)),
            }
        if totals := self._totals:
            actions |= {
                Op.B: self._backward,
                Op.BW: self._backward,
                Op.W: self._weight,
                Op.REDUCE: lambda i, step: self._gradients.reduce(_block(i)),
                Op.SUM: lambda i, step: self._gradients.sum(_block(i)),
                Op.TIE: lambda i, step: self._gradients.tie(_block(i)),
                Op.COUNT: lambda i, step: totals.count(step),
                Op.NORM: lambda i, step: totals.norm(step, self._gradients.finish()),
                Op.STEP: self._step,
                Op.SHARE: lambda i, step: self.parameters.share(_block(i)),
            }
        return actions

    def _forward(self, instruction: Instruction, step: StepRun) -> None:
        batch, run, number = self._place(instruction, step)
        self._ready(instruction, batch, run, step)
        known = self._known
        keep = self._totals is not None and known.keeps(instruction)
        self.compute.forward(number, batch, run, keep, known.regathered.get(instruction, ()))
        loss = self._anatomy.model.loss
        if loss in run.wires and loss in self._outputs(number):
            batch.loss = run.wires.pop(loss)
        if self._totals is None and self._plan.slices:
            self.compute.leave_past(number, batch)

    def _again(self, instruction: Instruction, step: StepRun) -> None:
        batch, run, number = self._place(instruction, step)
        self._ready(instruction, batch, run, step)
        self.compute.again(number, batch, run, outputs=instruction in self._known.gives)

    def _exchange(self, instruction: Instruction, step: StepRun) -> None:
        batch = self._batch(instruction, step)
        run = batch.stage(_stage(instruction))
        part = self._anatomy.part(instruction)
        assert part.exchange is not None
        self._take_inputs(instruction, batch, run)
        self._share(instruction, batch, run, step)
        self.exchanges.send(part, batch, run)

    def _exchange_back(self, instruction: Instruction, step: StepRun) -> None:
        batch = self._batch(instruction, step)
        run = batch.stage(_stage(instruction))
        part = self._anatomy.part(instruction)
        assert part.exchange is not None
        self._take_gradients(instruction, batch, run, step)
        self.exchanges.send_back(part, batch, run)

    def _backward(self, instruction: Instruction, step: StepRun) -> None:
        batch, run, number = self._place(instruction, step)
        self._take_gradients(instruction, batch, run, step)
        self._collect(self._outputs(number), instruction, batch, step)
        self.exchanges.have(self._missing(number, run), batch, run)
        self._have_parameters(instruction)
        if instruction.op is Op.B:
            self.compute.backward(number, run)
        else:
            self._gradients.add(self._names(number), self.compute.backward_weight(number, run))

    def _weight(self, instruction: Instruction, step: StepRun) -> None:
        _, run, number = self._place(instruction, step)
        self._have_parameters(instruction)
        self._gradients.add(self._names(number), self.compute.weight(number, run))

    def _send_forward(self, instruction: Instruction, step: StepRun) -> None:
        assert self._messages is not None
        batch, stage = self._batch(instruction, step), _stage(instruction)
        self.exchanges.have(self._crossing[stage], batch, batch.stages[stage])
        self._messages.send_forward(instruction, batch, self._known.stays.get(stage, frozenset()))

    def _send_backward(self, instruction: Instruction, step: StepRun) -> None:
        assert self._messages is not None
        batch, stage = self._batch(instruction, step), _stage(instruction)
        self._collect(self._crossing[stage - 1], instruction, batch, step)
        self._messages.send_backward(instruction, batch)

    def _drop(self, instruction: Instruction, step: StepRun) -> None:
        """Lets go of the wires that nobody reads any more, but as what the next stage will take."""
        gone = self._known.drops.get(instruction)
        if not gone:
            return
        batch, stage = self._batch(instruction, step), _stage(instruction)
        run = batch.stage(stage)
        if self._will_take(stage + 1, batch):
            self.exchanges.have_made_of(gone, self._crossing[stage], batch, run)
        for wire in gone:
            run.wires.pop(wire, None)
            if wire in run.arriving:  # done again for nobody: what travels is let arrive
                self._unread.append(run.arriving.pop(wire))
                self._forget_unread(leaving=2)

    def _will_take(self, stage: int, batch: MicroBatch) -> bool:
        """Whether what lies before a stage is on this rank, and the stage has not taken its inputs yet."""
        plan = self._plan
        follows = stage < plan.num_stages and plan.pp_index(stage) == plan.pp_index(stage - 1)
        return follows and not batch.stage(stage).has_inputs

    def _forget_unread(self, leaving: int = 0) -> None:
        while len(self._unread) > leaving:
            self._unread.popleft().wait("what nobody reads")

    def _step(self, instruction: Instruction, step: StepRun) -> None:
        assert self._totals is not None
        self._totals.step(step)
        self._gradients.release()
        self._forget_unread()
        if self._messages is not None:
            self._messages.settle()

    def _have_parameters(self, instruction: Instruction) -> None:
        """The last thing that a computation waits for."""
        self.parameters.ready(self._buckets[_block(instruction)])
        for watch in self.watches:
            watch.ready(instruction)

    def _ready(self, instruction: Instruction, batch: MicroBatch, run: StageRun, step: StepRun) -> None:
        """Waits for everything that a segment's forward reads."""
        wires = self.compute.blocks.blocks[self._anatomy.segment(instruction)].names("wire")
        self._take_inputs(instruction, batch, run)
        self._share(instruction, batch, run, step)
        self.exchanges.have(wires, batch, run)
        self._have_parameters(instruction)

    def _take_inputs(self, instruction: Instruction, batch: MicroBatch, run: StageRun) -> None:
        """What the stage before left, once: by reference if it is on this rank, else by message."""
        stage = _stage(instruction)
        if stage == 0 or run.has_inputs:
            return
        run.has_inputs = True
        if self._plan.pp_index(stage - 1) != self._plan.pp_index(stage):
            assert self._messages is not None
            self._messages.inputs(stage, place_of(instruction), run)
            return
        before = batch.stages[stage - 1]
        self.exchanges.have(self._crossing[stage - 1], batch, before)
        stays = self._known.stays.get(stage - 1, frozenset())
        for wire in self._crossing[stage - 1]:
            if wire in self._whole and batch.begin:
                continue  # came with the first slice
            keep = wire in stays or wire in self._whole
            run.wires[wire] = before.wires[wire] if keep else before.wires.pop(wire)
            run.differentiable[wire] = before.differentiable[wire]

    def _take_gradients(self, instruction: Instruction, batch: MicroBatch, run: StageRun, step: StepRun) -> None:
        """The gradients of what the stage put out, once; on the last stage that is the loss."""
        if run.has_gradients:
            return
        run.has_gradients = True
        stage = _stage(instruction)
        if stage == self._plan.num_stages - 1:
            assert batch.loss is not None and self._totals is not None, "forward comes before backward"
            run.gradients[self._anatomy.model.loss] = self._totals.scale(step).to(batch.loss.dtype)
        elif self._plan.pp_index(stage + 1) == self._plan.pp_index(stage):
            after = batch.stages[stage + 1]
            self._collect(self._crossing[stage], replace(instruction, stage=stage + 1), batch, step)
            run.gradients.update(
                {wire: after.gradients.pop(wire) for wire in self._crossing[stage] if wire in after.gradients}
            )
        else:
            assert self._messages is not None
            self._messages.output_gradients(stage, place_of(instruction), run)

    def _share(self, instruction: Instruction, batch: MicroBatch, run: StageRun, step: StepRun) -> None:
        """Wires that belong to the whole micro-batch are those of its first slice."""
        if self._whole and batch.begin:
            first = step.slices(place_of(instruction))[0].stage(_stage(instruction))
            for wire in self._whole & first.wires.keys():
                run.wires[wire], run.differentiable[wire] = first.wires[wire], first.differentiable[wire]

    def _collect(self, wires: Iterable[str], instruction: Instruction, batch: MicroBatch, step: StepRun) -> None:
        """Adds to gradients what comes back through exchanges; for what belongs to the whole, from all slices."""
        stage = _stage(instruction)
        wires = [wire for wire in wires if wire not in self._whole or batch.begin == 0]
        self.exchanges.collect(wires, batch, batch.stage(stage))
        for wire in self._whole.intersection(wires):
            for other in step.slices(place_of(instruction))[1:]:
                self.exchanges.collect([wire], other, other.stage(stage))
                gradient = other.stage(stage).gradients.pop(wire, None)
                if gradient is not None:
                    add_gradient(batch.stage(stage), wire, gradient)

    def _missing(self, number: int, run: StageRun) -> list[str]:
        """What was gathered again for a segment's backward."""
        return [wire for _, wire in run.saved[number].missing] if number in run.saved else []

    def _outputs(self, number: int) -> tuple[str, ...]:
        return self.compute.blocks.blocks[number].outputs

    def _names(self, number: int) -> tuple[str, ...]:
        return self.compute.blocks.blocks[number].names("parameter")

    def _place(self, instruction: Instruction, step: StepRun) -> tuple[MicroBatch, StageRun, int]:
        """The micro-batch, its run of the stage, and the segment that an instruction is about."""
        batch = self._batch(instruction, step)
        return batch, batch.stage(_stage(instruction)), self._anatomy.segment(instruction)

    def _batch(self, instruction: Instruction, step: StepRun) -> MicroBatch:
        return step.batch(place_of(instruction))


def _stage(instruction: Instruction) -> int:
    assert instruction.stage is not None
    return instruction.stage


def _block(instruction: Instruction) -> int:
    assert instruction.block is not None
    return instruction.block
