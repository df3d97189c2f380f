"""How much of a block's cost one instruction is: segments by their arithmetic, halves by their samples; and how much an
exchange sends. Sizes are expressions over the dims of a micro-batch, which are evaluated here.
"""

from __future__ import annotations

from collections.abc import Mapping

from phalanx.model.graph.expressions import evaluate
from phalanx.program.instructions import Instruction, Op
from phalanx.program.shape import ModelShape, Step


class Shares:
    """dims: of a whole micro-batch, as every rank of a tensor-parallel group sees it. halves: parts of it."""

    def __init__(self, shape: ModelShape, dims: Mapping[str, int], halves: int) -> None:
        self._shape, self._dims, self._halves = shape, dims, halves
        self._known: dict[int, tuple[float, ...]] = {}  # per block, of each step

    def of(self, instruction: Instruction) -> float:
        """The part of its block that a computation is."""
        part = 1.0 if instruction.half is None else 1 / self._halves
        if instruction.step is None:
            return part
        assert instruction.block is not None
        if instruction.block not in self._known:
            self._known[instruction.block] = self._of_steps(self._shape.steps_of(instruction.block))
        return part * self._known[instruction.block][instruction.step]

    def elements(self, instruction: Instruction) -> float:
        """Of the whole tensor that a collective reduces, gathers or scatters."""
        count = evaluate(self.step_of(instruction).elements, self._dims)
        return count if instruction.half is None else count / self._halves

    def collective(self, instruction: Instruction) -> str:
        step = self.step_of(instruction)
        return step.backward if instruction.op is Op.CB else step.forward

    def step_of(self, instruction: Instruction) -> Step:
        assert instruction.block is not None and instruction.step is not None
        return self._shape.steps_of(instruction.block)[instruction.step]

    def _of_steps(self, steps: tuple[Step, ...]) -> tuple[float, ...]:
        segments = [step.kind == "segment" for step in steps]
        flops = [evaluate(step.flops, self._dims) if own else 0 for step, own in zip(steps, segments)]
        if not any(flops):
            return tuple(own / sum(segments) for own in segments)
        return tuple(count / sum(flops) for count in flops)
