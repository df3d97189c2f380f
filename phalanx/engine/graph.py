"""How the model's blocks are made of segments and redistributions on this rank: what an instruction is about.

A block is always a chain of ops; without tensor parallelism it is one segment.
"""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.model.graph.blocks import Block, Blocks
from phalanx.model.shard.sharded import Part, Sharded
from phalanx.program.instructions import Instruction


@dataclass(frozen=True)
class ExecutionGraph:
    """model: the blocks that a plan speaks of. segments: what is run. parts: how the former are made of the latter."""

    model: Blocks
    segments: Blocks
    parts: tuple[tuple[Part, ...], ...]

    @staticmethod
    def of(model: Blocks, sharded: Sharded | None) -> ExecutionGraph:
        if sharded is not None:
            return ExecutionGraph(model, sharded.blocks, sharded.parts)
        return ExecutionGraph(model, model, tuple((Part(segment=number),) for number in range(len(model.blocks))))

    def part(self, instruction: Instruction) -> Part:
        assert instruction.block is not None
        return self.parts[instruction.block][instruction.op_index or 0]

    def segment(self, part: Part) -> Block:
        assert part.segment is not None, "a redistribution is not a segment"
        return self.segments.blocks[part.segment]
