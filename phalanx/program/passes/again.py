"""What is done again before a backward: segments whose forward kept nothing, collectives whose result was not kept."""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.program.block_ops import BlockOps
from phalanx.program.instructions import Op

Piece = tuple[Op, int]  # what is done with which op of a block


def done_again(block: BlockOps, portion: Sequence[int]) -> list[Piece]:
    """Before the backward of a portion: its forward, in forward order, where the plan computes anything again."""
    return [(block.again_as(i), i) for i in portion if i in block.done_again] if block.again else []


def gathered_again(block: BlockOps, segment: int) -> list[Piece]:
    """Before the B of a segment, where only collectives are done again: those whose last reader it is."""
    if block.again:
        return []
    return [(Op.CA, i) for i in block.sent_again if max(block.segments_reading(i)) == segment]
