"""From stages to blocks: forwards run a stage's blocks first to last, everything backward last to first.

Blocks that run once per micro-batch do so with slice 0: first of the forward, last of the backward.
"""

from __future__ import annotations

from collections.abc import Callable

from phalanx.program.instructions import Instruction, Op, Program
from phalanx.program.shape import ModelShape


def to_blocks(program: Program, blocks_of: Callable[[int], range]) -> Program:
    """Replaces each computation of a stage by those of its blocks."""
    lowered: list[Instruction] = []
    for instruction in program:
        assert instruction.stage is not None
        blocks = blocks_of(instruction.stage)
        blocks = blocks if instruction.op is Op.F else reversed(blocks)
        lowered += [instruction._replace(block=block) for block in blocks]
    return tuple(lowered)


def at_their_grain(program: Program, shape: ModelShape) -> Program:
    """Without the blocks of later slices that have run with slice 0, where micro-batches are cut."""
    return tuple(it for it in program if not it.slice or it.block is None or it.block >= shape.num_whole_blocks)


def add_inputs(program: Program) -> Program:
    """Each micro-batch's inputs, or those of its half, before the first computation on them."""
    lowered: list[Instruction] = []
    seen: set[tuple[int | None, int | None]] = set()
    for it in program:
        if (it.micro_batch, it.half) not in seen:
            seen.add((it.micro_batch, it.half))
            lowered.append(Instruction(Op.INPUT, micro_batch=it.micro_batch, half=it.half))
        lowered.append(it)
    return tuple(lowered)
