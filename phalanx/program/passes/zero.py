"""Parameters that are not always here: they are gathered from the ranks that share them (ZeRO 3), or fetched from the
host, before they are used, and live until their last use.

What the next block needs is brought before the current one starts, so that the transfer hides behind it. A block's use
lasts over all its ops and halves, and where halves are interleaved it may begin before that of the one before ends.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from itertools import groupby

from phalanx.program.instructions import Instruction, Op, Program, insert
from phalanx.program.shape import ModelShape
from phalanx.program.visits import visit_of

# A computes from them; W recomputes from them what was not kept.
USES_PARAMETERS = frozenset((Op.F, Op.B, Op.W, Op.BW, Op.A))


@dataclass
class Use:
    """What one visit needs of one block, from its first to its last position in the program."""

    begin: int
    end: int
    buckets: tuple[int, ...]


def gather_per_micro_batch(program: Program, shape: ModelShape, split: bool) -> Program:
    return _brought(program, _uses(program, shape, split), lambda it, buckets: _for_each(Op.GATHER, it, buckets))


def fetch(program: Program, shape: ModelShape, split: bool, hosted: Collection[int]) -> Program:
    """hosted: the buckets on the host."""
    uses = [
        Use(use.begin, use.end, tuple(bucket for bucket in use.buckets if bucket in hosted))
        for use in _uses(program, shape, split)
    ]
    return _brought(program, uses, lambda _, buckets: [_fetch(bucket) for bucket in buckets])


def fetch_to_gather(program: Program, shape: ModelShape, hosted: Collection[int]) -> Program:
    """Before a rank's shard of them is gathered with those of others: with the gathers before, so that these wait for
    nothing, but not before what was gathered last of the same has been used. hosted: the buckets on the host."""
    before: defaultdict[int, list[Instruction]] = defaultdict(list)
    after: defaultdict[int, list[Instruction]] = defaultdict(list)
    used: dict[int, int] = {}
    earlier: int | None = None
    runs = {run[0]: run for run in _consecutive(i for i, it in enumerate(program) if it.op is Op.GATHER)}
    for position, it in enumerate(program):
        if position in runs:
            for bucket in (program[i].block for i in runs[position]):
                if bucket is not None and bucket in hosted:
                    place = position if earlier is None else earlier
                    is_early = used.get(bucket, -1) < place
                    (before[place] if is_early else after[used[bucket]]).append(_fetch(bucket))
            earlier = position
        if it.op in USES_PARAMETERS and it.block is not None:
            used |= dict.fromkeys(shape.buckets(it.block), position)
    return insert(program, before, after)


def _consecutive(positions: Iterable[int]) -> list[list[int]]:
    """Runs of positions that follow each other."""
    numbered = groupby(enumerate(positions), key=lambda pair: pair[1] - pair[0])
    return [[position for _, position in run] for _, run in numbered]


def _fetch(bucket: int) -> Instruction:
    return Instruction(Op.IN, block=bucket)


Bring = Callable[[Instruction, Iterable[int]], list[Instruction]]  # what a computation needs of some buckets


def _brought(program: Program, uses: list[Use], bring: Bring) -> Program:
    """Parameters of the current and the next use's blocks are there, no others."""
    needed = [set(use.buckets) for use in uses]
    before: defaultdict[int, list[Instruction]] = defaultdict(list)
    after: defaultdict[int, list[Instruction]] = defaultdict(list)
    for k, use in enumerate(uses):
        if k == 0:
            before[use.begin] += bring(program[use.begin], use.buckets)
        if k + 1 < len(uses):
            new = (bucket for bucket in uses[k + 1].buckets if bucket not in needed[k])
            brings = bring(program[uses[k + 1].begin], new)
            # Not before the block before is done with, or three would be there at once.
            overlapped = k > 0 and uses[k - 1].end > use.begin
            (after[uses[k - 1].end] if overlapped else before[use.begin]).extend(brings)
    return insert(program, before, after)


def gather_per_step(program: Program, shape: ModelShape, split: bool) -> Program:
    """Each bucket is gathered once, one use ahead of its first."""
    uses = _uses(program, shape, split)
    first: dict[int, int] = {}
    for k, use in enumerate(uses):
        for bucket in use.buckets:
            first.setdefault(bucket, k)
    before: defaultdict[int, list[Instruction]] = defaultdict(list)
    for bucket, k in first.items():
        before[uses[max(0, k - 1)].begin] += _for_each(Op.GATHER, program[uses[k].begin], [bucket])
    return insert(program, before, {})


def _uses(program: Program, shape: ModelShape, split: bool) -> list[Use]:
    """In the order in which they begin."""
    uses: dict[tuple[Instruction, int], Use] = {}
    for position, instruction in enumerate(program):
        if instruction.op in USES_PARAMETERS and instruction.block is not None:
            place = (visit_of(instruction, split), instruction.block)
            use = uses.setdefault(place, Use(position, position, shape.buckets(instruction.block)))
            use.end = position
    return [_whole([uses[place] for place in row]) for _, row in groupby(uses, key=_without_micro_batch)]


def _without_micro_batch(place: tuple[Instruction, int]) -> tuple[Instruction, int]:
    visit, block = place
    return visit._replace(micro_batch=None, slice=None), block


def _whole(row: list[Use]) -> Use:
    """Of one block by micro-batches that follow each other: the next block's parameters travel behind all of them."""
    return Use(row[0].begin, max(use.end for use in row), row[0].buckets)


def _for_each(op: Op, compute: Instruction, buckets: Iterable[int]) -> list[Instruction]:
    return [compute._replace(op=op, block=bucket, half=None, op_index=None) for bucket in buckets]
