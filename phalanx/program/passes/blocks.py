"""From stages to blocks: forwards run a stage's blocks first to last, everything backward last to first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from phalanx.program.instructions import Instruction, Op, Program


def to_blocks(program: Program, blocks_of: Callable[[int], range]) -> Program:
    """Replaces each computation of a stage by those of its blocks."""
    lowered: list[Instruction] = []
    for instruction in program:
        assert instruction.stage is not None
        blocks = blocks_of(instruction.stage)
        blocks = blocks if instruction.op is Op.F else reversed(blocks)
        lowered += [replace(instruction, block=block) for block in blocks]
    return tuple(lowered)
