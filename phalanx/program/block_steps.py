"""What the steps of one block mean for its backward: who reads what, and which of them are done again.

Pure and about one block; the order in which a program does it all is the business of `passes/steps.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from phalanx.plan.plan import Plan
from phalanx.program.instructions import Op
from phalanx.program.shape import COLLECTIVE, ModelShape, Step

_LEAVES = ("all_reduce", "reduce_scatter")  # forward collectives that end a unit


@dataclass(frozen=True)
class BlockSteps:
    """again: what is computed again at a time, a `block`, a `unit` or nothing. regathers: what was gathered on the way
    into a unit is not kept. `numbered`: the block has steps at all, so that instructions name them."""

    steps: tuple[Step, ...]
    again: str = ""
    regathers: bool = False
    numbered: bool = True

    @staticmethod
    def of(plan: Plan, shape: ModelShape, block: int) -> BlockSteps:
        steps, policy = shape.steps_of(block), plan.recompute_of(block, shape.layers)
        again = policy if policy in ("unit", "block") else ""  # anything less is the affair of segments
        return BlockSteps(steps, again, plan.saves == "input", numbered=len(steps) > 1)

    @cached_property
    def segments(self) -> tuple[int, ...]:
        return tuple(i for i, step in enumerate(self.steps) if step.kind == "segment")

    @cached_property
    def moved_forward(self) -> tuple[int, ...]:
        """Exchanges that do anything in the forward."""
        return tuple(i for i, step in enumerate(self.steps) if step.kind == "exchange" and step.forward)

    @cached_property
    def moved_backward(self) -> tuple[int, ...]:
        return tuple(i for i, step in enumerate(self.steps) if step.kind == "exchange" and step.backward)

    @cached_property
    def sent_forward(self) -> tuple[int, ...]:
        """Exchanges with a collective in the forward."""
        return tuple(i for i in self.moved_forward if self.steps[i].forward in COLLECTIVE)

    def forward(self, i: int) -> Op:
        """What step i is in the forward."""
        return Op.F if i in self.segments else Op.CF if self.steps[i].forward in COLLECTIVE else Op.LF

    def again_as(self, i: int) -> Op:
        """What step i is when it is done again."""
        return {Op.F: Op.A, Op.CF: Op.CA, Op.LF: Op.LA}[self.forward(i)]

    def backward(self, i: int) -> Op:
        """What exchange i is in the backward."""
        return Op.CB if self.steps[i].backward in COLLECTIVE else Op.LB

    @cached_property
    def portions(self) -> tuple[range, ...]:
        """Runs of steps that are computed again together, directly before their backward. Where nothing is exchanged,
        each segment is a unit."""
        ends = [i + 1 for i in self.sent_forward if self.steps[i].forward in _LEAVES]
        if len(self.segments) == len(self.steps):
            ends = [i + 1 for i in self.segments]
        bounds = sorted({0, *(ends if self.again == "unit" else ()), len(self.steps)})
        return tuple(range(begin, end) for begin, end in pairwise(bounds))

    @cached_property
    def done_again(self) -> tuple[int, ...]:
        """The steps that are done again before the backward, in the order of the forward. Of exchanges that only cut
        something those whose source is made again."""
        again = {*(self.segments if self.again else ()), *self.sent_again}
        made = {wire for i in again for wire in self.steps[i].writes}
        for i in self.moved_forward:
            if self.steps[i].forward not in COLLECTIVE and self.steps[i].reads[0] in made:
                again.add(i)
                made.update(self.steps[i].writes)
        return tuple(sorted(again))

    @cached_property
    def sent_again(self) -> tuple[int, ...]:
        """Exchanges whose forward collective is done again before the backward."""
        if self.again == "block":
            return self.sent_forward
        gathers = [i for i in self.sent_forward if self.steps[i].forward == "all_gather"] if self.regathers else []
        return tuple(i for i in gathers if self._is_used_in_its_portion(i))

    def readers(self, exchange: int) -> tuple[int, ...]:
        """The steps of the block that need what an exchange writes: segments, and exchanges that send it on; directly,
        or through exchanges that send nothing."""
        (wire,) = self.steps[exchange].writes
        return self._readers(wire, exchange, "forward")

    def segments_reading(self, exchange: int) -> tuple[int, ...]:
        return tuple(i for i in self.readers(exchange) if i in self.segments)

    def gradient_readers(self, exchange: int) -> tuple[int, ...]:
        """The steps whose backward must be done before that of an exchange."""
        (wire,) = self.steps[exchange].writes
        return self._readers(wire, exchange, "backward")

    def first_reader(self, exchange: int) -> int | None:
        """The segment after whose B the gradient of an exchange's result is complete; None: none here adds to it."""
        ends = [self.first_reader(i) if i in self.moved_backward else i for i in self.gradient_readers(exchange)]
        return min((end for end in ends if end is not None), default=None)

    def _readers(self, wire: str, after: int, direction: str) -> tuple[int, ...]:
        found: set[int] = set()
        for i in range(after + 1, len(self.steps)):
            step = self.steps[i]
            if wire in step.reads:
                passes = step.kind == "exchange" and not getattr(step, direction)
                found |= set(self._readers(step.writes[0], i, direction)) if passes else {i}
        return tuple(sorted(found))

    def _is_used_in_its_portion(self, exchange: int) -> bool:
        (portion,) = (portion for portion in self.portions if exchange in portion)
        return bool(self.segments_reading(exchange)) and all(i in portion for i in self.readers(exchange))
