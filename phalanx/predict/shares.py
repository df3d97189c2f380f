"""How much of a block's cost one instruction is: segments by their arithmetic, halves by their samples, slices by their
tokens and what these attend to; and how much a redistribution or a message sends. Sizes are expressions over the dims
of a micro-batch, which are evaluated here.
"""

from __future__ import annotations

from functools import cached_property

from phalanx.expressions import evaluate
from phalanx.plan.plan import Plan
from phalanx.predict.costs import TOKENS, Costs, Tokens, num_tokens, work_of
from phalanx.program.instructions import Instruction, Op
from phalanx.program.shape import BlockOp, ModelShape


class Shares:
    """Of the costs of a whole micro-batch, as every rank of a tensor-parallel group sees it."""

    def __init__(self, plan: Plan, shape: ModelShape, costs: Costs) -> None:
        self._plan, self._shape, self._costs = plan, shape, costs
        self._known: dict[tuple[int, Tokens | None], tuple[float, ...]] = {}  # of each op of a block

    def seconds(self, instruction: Instruction) -> float:
        """The part of its block's time that a computation takes."""
        tokens = self._tokens(instruction)
        part = self._half(instruction) * self._of_slice(instruction, tokens)
        return part if instruction.op_index is None else part * self._of_op(instruction, tokens)

    def slice(self, instruction: Instruction) -> float:
        """The part of a micro-batch that its slice is."""
        return self._of_slice(instruction, self._tokens(instruction))

    def elements(self, instruction: Instruction) -> float:
        """Of the whole tensor that a collective reduces, gathers or scatters."""
        tokens = self._tokens(instruction)
        dims = dict(self._costs.dims)
        if TOKENS in dims:
            dims |= {"whole_tokens": dims[TOKENS], TOKENS: dims[TOKENS] if tokens is None else tokens[1] - tokens[0]}
        return self._half(instruction) * evaluate(self.op_of(instruction).elements, dims)

    def collective(self, instruction: Instruction) -> str:
        op = self.op_of(instruction)
        return op.backward if instruction.op is Op.CB else op.forward

    def op_of(self, instruction: Instruction) -> BlockOp:
        assert instruction.block is not None and instruction.op_index is not None
        return self._shape.ops_of(instruction.block)[instruction.op_index]

    def _half(self, instruction: Instruction) -> float:
        return 1.0 if instruction.half is None else 1 / self._plan.halves

    def _tokens(self, instruction: Instruction) -> Tokens | None:
        """The tokens that an instruction is about; None for all of its micro-batch."""
        block = instruction.block
        assert block is not None and instruction.micro_batch is not None
        if instruction.slice is None or block < self._shape.num_whole_blocks:
            return None
        edges = self._plan.slice_bounds(instruction.micro_batch, self._num_tokens)
        return edges[instruction.slice], edges[instruction.slice + 1]

    @cached_property
    def _num_tokens(self) -> int:
        return num_tokens(self._plan, self._costs.dims)

    def _length(self, tokens: Tokens | None) -> float:
        return 1.0 if tokens is None else (tokens[1] - tokens[0]) / self._num_tokens

    def _of_slice(self, instruction: Instruction, tokens: Tokens | None) -> float:
        block, micro_batch, slice = instruction.block, instruction.micro_batch, instruction.slice
        if tokens is None or block is None or micro_batch is None or slice is None:
            return 1.0
        if self._costs.slice_cost is not None:
            return self._costs.slice_cost(block, micro_batch, slice)
        whole = sum(self._work(block, None))
        return sum(self._work(block, tokens)) / whole if whole else self._length(tokens)

    def _of_op(self, instruction: Instruction, tokens: Tokens | None) -> float:
        """The part of its block, or of its block's slice."""
        assert instruction.block is not None and instruction.op_index is not None
        work = self._work(instruction.block, tokens)
        if any(work):
            return work[instruction.op_index] / sum(work)
        segments = [op.kind == "segment" for op in self._shape.ops_of(instruction.block)]
        return segments[instruction.op_index] / sum(segments)

    def _work(self, block: int, tokens: Tokens | None) -> tuple[float, ...]:
        """Arithmetic of the ops of a block."""
        if (block, tokens) not in self._known:
            flops = [op.flops if op.kind == "segment" else "0" for op in self._shape.ops_of(block)]
            self._known[block, tokens] = tuple(work_of(count, self._costs.dims, tokens) for count in flops)
        return self._known[block, tokens]
