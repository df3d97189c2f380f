"""From blocks to their ops: segments and the collectives between them, for each half of a micro-batch.

Halves take turns at collectives, across blocks: while one's collective travels the other computes. So do, where a plan
wants it, the backward of a micro-batch and the forward of the next. The collective of an input's gradient stands before
the weight gradients of the same segment, which hide it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from phalanx.plan.plan import Plan
from phalanx.program.block_ops import BlockOps
from phalanx.program.instructions import REDISTRIBUTIONS, Instruction, Op, Program
from phalanx.program.shape import ModelShape

Piece = tuple[Op, int]  # what is done with which op of a block


Run = list[Instruction]  # what a half does before it is another's turn
Runs = list[Run]


def to_ops(program: Program, shape: ModelShape, plan: Plan) -> Program:
    """Replaces each computation of a block by those of its ops."""
    halves = range(plan.halves) if plan.halves > 1 else (None,)
    blocks = [BlockOps.of(plan, shape, block) for block in range(shape.num_blocks)]
    lowered: list[Instruction] = []
    visits = groupby(program, key=lambda it: it._replace(block=None))
    runs = [list(_runs([it for whole in visit for it in _ops_of(whole, blocks)])) for _, visit in visits]
    for beside in _beside(runs, plan.pairs):
        for turn in _turns(beside):
            lowered += [it._replace(half=half) for half in halves for run in turn for it in run]
    return tuple(lowered)


def _beside(runs: Sequence[Runs], pairs: bool) -> Iterator[Sequence[Runs]]:
    """The runs of visits that take turns: each visit for itself or, one forward and one backward following each other,
    the first forward for itself and then every backward with the forward after it."""
    yield runs[:1]
    for n in range(1, len(runs), 2 if pairs else 1):
        yield runs[n : n + 2] if pairs else runs[n : n + 1]


def _turns(beside: Sequence[Runs]) -> Iterator[list[Run]]:
    """Runs to be done in turn: those of the shorter visit evenly among the longer's; both end with the last turn."""
    longest = max(map(len, beside))
    for n in range(longest):
        bounds = [(len(own) * n // longest, len(own) * (n + 1) // longest) for own in beside]
        yield [run for own, (begin, end) in zip(beside, bounds) for run in own[begin:end]]


def _ops_of(whole: Instruction, blocks: Sequence[BlockOps]) -> Iterator[Instruction]:
    assert whole.block is not None
    block = blocks[whole.block]
    for op, op_index in _pieces(whole.op, block):
        yield whole._replace(op=op, op_index=op_index if block.numbered else None)


def _pieces(op: Op, block: BlockOps) -> list[Piece]:
    if op is Op.F:
        return [(block.forward(i), i) for i in sorted(block.segments + block.moved_forward)]
    if op is Op.W:
        return [(Op.W, i) for i in reversed(block.segments)]
    return list(_backward(op, block))


def _backward(op: Op, block: BlockOps) -> Iterator[Piece]:
    moved = [(i, block.first_reader(i)) for i in reversed(block.moved_backward)]
    # Complete when the block's backward begins, so these travel behind what is computed again.
    yield from ((block.backward(i), i) for i, reader in moved if reader is None)
    for portion in reversed(block.portions):
        yield from done_again(block, portion)
        for segment in (i for i in reversed(portion) if i in block.segments):
            yield from gathered_again(block, segment)
            complete = [(block.backward(i), i) for i, reader in moved if reader == segment]
            if op is Op.BW and not complete:
                yield Op.BW, segment
                continue
            yield Op.B, segment
            yield from complete
            if op is Op.BW:
                yield Op.W, segment


def _runs(instructions: Sequence[Instruction]) -> Iterator[Run]:
    """What a half does before it is the other's turn: up to a collective and the weight gradients behind it.

    A run reaches into two blocks at most, so that no more than two are needed at once: their parameters may have to be
    gathered.
    """
    run: Run = []
    for it in instructions:
        is_next = (
            it.op not in REDISTRIBUTIONS and it.op is not Op.W and any(other.op in REDISTRIBUTIONS for other in run)
        )
        if run and (is_next or len({other.block for other in (*run, it)}) > 2):
            yield run
            run = []
        run.append(it)
    yield run


def done_again(block: BlockOps, portion: Sequence[int]) -> list[Piece]:
    """Before the backward of a portion: its forward, in forward order, where the plan computes anything again."""
    return [(block.again_as(i), i) for i in portion if i in block.done_again] if block.again else []


def gathered_again(block: BlockOps, segment: int) -> list[Piece]:
    """Before the B of a segment, where only collectives are done again: those whose last reader it is."""
    if block.again:
        return []
    return [(Op.CA, i) for i in block.sent_again if max(block.segments_reading(i)) == segment]
