"""How the model's blocks are made of segments and redistributions on this rank: what an instruction is about.

A block is always a chain of ops; without tensor parallelism of one segment, or of one for each of its units.
"""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.model.graph.blocks import Block, Blocks
from phalanx.model.shard.sharded import Chained, Part
from phalanx.program.instructions import Instruction


@dataclass(frozen=True)
class ExecutionGraph:
    """model: the blocks that a plan speaks of. segments: what is run. parts: how the former are made of the latter.
    light: the blocks whose segments keep only products and attention."""

    model: Blocks
    segments: Blocks
    parts: tuple[tuple[Part, ...], ...]
    light: frozenset[int] = frozenset()

    @staticmethod
    def of(model: Blocks, chained: Chained, light: frozenset[int] = frozenset()) -> ExecutionGraph:
        return ExecutionGraph(model, chained.blocks, chained.parts, light)

    def part(self, instruction: Instruction) -> Part:
        assert instruction.block is not None
        return self.parts[instruction.block][instruction.op_index or 0]

    def segment(self, part: Part) -> Block:
        assert part.segment is not None, "a redistribution is not a segment"
        return self.segments.blocks[part.segment]
