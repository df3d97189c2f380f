"""What is to be done for one block of the model: which pieces there are, and what each needs of the same block.

Derived from the steps and the plan, without looking at how `passes/` order them: two opinions on the same thing.
"""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.program.block_steps import BlockSteps
from phalanx.program.instructions import Op

Piece = tuple[Op, int | None]  # F, A, B, W, CF, CA or CB, step
Needs = dict[Piece, tuple[Piece, ...]]


@dataclass(frozen=True)
class BlockPieces:
    """needs: every piece, in an order in which they may run. first: pieces that wait for the block before (forward) or
    after (backward). forward_end, backward_end: what is done last in each direction, for which other blocks wait."""

    needs: Needs
    first: frozenset[Piece]
    forward_end: tuple[Piece, ...]
    backward_end: tuple[Piece, ...]
    num_segments: int


def pieces_of(block: BlockSteps, training: bool) -> BlockPieces:
    steps = sorted(block.segments + block.sent_forward)
    forward: list[Piece] = [(Op.F if i in block.segments else Op.CF, i) for i in steps]
    needs: Needs = {piece: tuple(forward[max(0, n - 1) : n]) for n, piece in enumerate(forward)}
    first = {forward[0]}
    end: list[Piece] = [(Op.B, block.segments[0]), *((Op.CB, i) for i in block.sent_backward)]
    if training:
        needs |= _again(block) | _backward(block)
        first |= {(Op.B, block.segments[-1])}
        first |= {(Op.CB, i) for i in block.sent_backward if not block.gradient_readers(i)}
    if not block.numbered:
        return _unnumbered(needs)
    return BlockPieces(needs, frozenset(first), tuple(forward[-1:]), tuple(end), len(block.segments))


def _again(block: BlockSteps) -> Needs:
    """What is done again follows what it repeats, and within a portion what comes before it."""
    needs: Needs = {(Op.CA, i): ((Op.CF, i),) for i in block.sent_again}
    if block.again:
        for portion in block.portions:
            before: tuple[Piece, ...] = ()
            for i in (i for i in portion if i in block.segments + block.sent_again):
                piece = (Op.A, i) if i in block.segments else (Op.CA, i)
                needs[piece] = (((Op.F, i) if i in block.segments else (Op.CF, i)), *before)
                before = (piece,)
    return needs


def _backward(block: BlockSteps) -> Needs:
    needs: Needs = {}
    later: tuple[Piece, ...] = ()
    for i in reversed(block.segments):
        again = [(Op.A, i)] if block.again else [(Op.CA, e) for e in block.sent_again if i in block.readers(e)]
        sent = [(Op.CB, e) for e in block.sent_backward if e > i]
        needs[Op.B, i] = ((Op.F, i), *again, *later, *sent)
        needs[Op.W, i] = ((Op.B, i),)
        later = ((Op.B, i),)
    for e in block.sent_backward:
        readers = block.gradient_readers(e)
        needs[Op.CB, e] = tuple((Op.B if i in block.segments else Op.CB, i) for i in readers)
    return needs


def _unnumbered(needs: Needs) -> BlockPieces:
    """Of a block that is one segment; its instructions name no step."""
    own: Needs = {(op, None): tuple((other, None) for other, _ in before) for (op, _), before in needs.items()}
    forward, backward = (Op.F, None), (Op.B, None)
    return BlockPieces(own, frozenset((forward, backward)), (forward,), (backward,), num_segments=1)
