"""What the ops of one block mean for its backward: who reads what, and which of them are done again.

Pure and about one block; the order in which a program does it all is the business of `passes/ops.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from phalanx.plan.plan import Plan
from phalanx.program.instructions import Op
from phalanx.program.shape import COLLECTIVE, BlockOp, ModelShape

_LEAVES = ("all_reduce", "reduce_scatter")  # forward collectives that end a unit


@dataclass(frozen=True)
class BlockOps:
    """again: what is computed again at a time, a `block`, a `unit` or nothing. regathers: what was gathered on the way
    into a unit is not kept. `numbered`: the block has ops at all, so that instructions name them."""

    ops: tuple[BlockOp, ...]
    again: str = ""
    regathers: bool = False
    numbered: bool = True

    @staticmethod
    def of(plan: Plan, shape: ModelShape, block: int) -> BlockOps:
        ops = shape.ops_of(block)
        return BlockOps(ops, plan.again, plan.saves == "input", numbered=len(ops) > 1)

    @cached_property
    def segments(self) -> tuple[int, ...]:
        return tuple(i for i, op in enumerate(self.ops) if op.kind == "segment")

    @cached_property
    def moved_forward(self) -> tuple[int, ...]:
        """Redistributions that do anything in the forward."""
        return tuple(i for i, op in enumerate(self.ops) if op.kind == "redistribution" and op.forward)

    @cached_property
    def moved_backward(self) -> tuple[int, ...]:
        return tuple(i for i, op in enumerate(self.ops) if op.kind == "redistribution" and op.backward)

    @cached_property
    def sent_forward(self) -> tuple[int, ...]:
        """Redistributions with a collective in the forward."""
        return tuple(i for i in self.moved_forward if self.ops[i].forward in COLLECTIVE)

    def forward(self, i: int) -> Op:
        """What op i is in the forward."""
        return Op.F if i in self.segments else Op.CF if self.ops[i].forward in COLLECTIVE else Op.LF

    def again_as(self, i: int) -> Op:
        """What op i is when it is done again."""
        return {Op.F: Op.A, Op.CF: Op.CA, Op.LF: Op.LA}[self.forward(i)]

    def backward(self, i: int) -> Op:
        """What redistribution i is in the backward."""
        return Op.CB if self.ops[i].backward in COLLECTIVE else Op.LB

    @cached_property
    def portions(self) -> tuple[range, ...]:
        """Runs of ops that are computed again together, directly before their backward."""
        ends = [i + 1 for i in self.sent_forward if self.ops[i].forward in _LEAVES] if self.again == "unit" else []
        bounds = sorted({0, *ends, len(self.ops)})
        return tuple(range(begin, end) for begin, end in pairwise(bounds))

    @cached_property
    def done_again(self) -> tuple[int, ...]:
        """The ops that are done again before the backward, in the order of the forward. Of redistributions that only
        cut something those whose source is made again."""
        again = {*(self.segments if self.again else ()), *self.sent_again}
        made = {name for i in again for name in self.ops[i].writes}
        for i in self.moved_forward:
            if self.ops[i].forward not in COLLECTIVE and self.ops[i].reads[0] in made:
                again.add(i)
                made.update(self.ops[i].writes)
        return tuple(sorted(again))

    @cached_property
    def sent_again(self) -> tuple[int, ...]:
        """Redistributions whose forward collective is done again before the backward."""
        if self.again == "block":
            return self.sent_forward
        gathers = [i for i in self.sent_forward if self.ops[i].forward == "all_gather"] if self.regathers else []
        return tuple(i for i in gathers if self._is_used_in_its_portion(i))

    def readers(self, redistribution: int) -> tuple[int, ...]:
        """The ops of the block that need what a redistribution writes: segments, and redistributions that send it on;
        directly, or through redistributions that send nothing."""
        (name,) = self.ops[redistribution].writes
        return self._readers(name, redistribution, "forward")

    def segments_reading(self, redistribution: int) -> tuple[int, ...]:
        return tuple(i for i in self.readers(redistribution) if i in self.segments)

    def gradient_readers(self, redistribution: int) -> tuple[int, ...]:
        """The ops whose backward must be done before that of a redistribution."""
        (name,) = self.ops[redistribution].writes
        return self._readers(name, redistribution, "backward")

    def first_reader(self, redistribution: int) -> int | None:
        """The segment after whose B the gradient of a redistribution's result is complete; None: none here adds to
        it."""
        ends = [self.first_reader(i) if i in self.moved_backward else i for i in self.gradient_readers(redistribution)]
        return min((end for end in ends if end is not None), default=None)

    def _readers(self, name: str, after: int, direction: str) -> tuple[int, ...]:
        found: set[int] = set()
        for i in range(after + 1, len(self.ops)):
            op = self.ops[i]
            if name in op.reads:
                passes = op.kind == "redistribution" and not getattr(op, direction)
                found |= set(self._readers(op.writes[0], i, direction)) if passes else {i}
        return tuple(sorted(found))

    def _is_used_in_its_portion(self, redistribution: int) -> bool:
        (portion,) = (portion for portion in self.portions if redistribution in portion)
        return bool(self.segments_reading(redistribution)) and all(i in portion for i in self.readers(redistribution))
