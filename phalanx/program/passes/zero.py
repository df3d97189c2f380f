"""ZeRO 3: a bucket's parameters are gathered before they are used and freed afterwards.

What the next computation needs is gathered before the current one starts, so that the transfer hides behind it. W
needs no parameters: what it multiplies was saved by B.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from phalanx.program.instructions import Instruction, Op, Program
from phalanx.program.passes.insert import insert
from phalanx.program.shape import ModelShape

USES_PARAMETERS = frozenset((Op.F, Op.B, Op.W, Op.BW))  # W recomputes from them what was not kept


def gather_per_micro_batch(program: Program, shape: ModelShape) -> Program:
    """Parameters of the current and the next computation's blocks are there, no others."""
    uses = _uses(program, shape)
    needed = [set(buckets) for _, buckets in uses] + [set[int]()]
    before: defaultdict[int, list[Instruction]] = defaultdict(list)
    after: dict[int, list[Instruction]] = {}
    for k, (position, buckets) in enumerate(uses):
        if k == 0:
            before[position] += _for_each(Op.GATHER, program[position], buckets)
        if k + 1 < len(uses):
            following, wanted = uses[k + 1]
            new = [bucket for bucket in wanted if bucket not in needed[k]]
            before[position] += _for_each(Op.GATHER, program[following], new)
        unused = [bucket for bucket in buckets if bucket not in needed[k + 1]]
        after[position] = _for_each(Op.FREE, program[position], unused)
    return insert(program, before, after)


def gather_per_step(program: Program, shape: ModelShape) -> Program:
    """Each bucket is gathered once, one computation ahead of its first use, and freed after its last."""
    uses = _uses(program, shape)
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for k, (_, buckets) in enumerate(uses):
        for bucket in buckets:
            first.setdefault(bucket, k)
            last[bucket] = k
    before: defaultdict[int, list[Instruction]] = defaultdict(list)
    after: defaultdict[int, list[Instruction]] = defaultdict(list)
    for bucket, k in first.items():
        before[uses[max(0, k - 1)][0]] += _for_each(Op.GATHER, program[uses[k][0]], [bucket])
    for bucket, k in last.items():
        after[uses[k][0]] += _for_each(Op.FREE, program[uses[k][0]], [bucket])
    return insert(program, before, after)


def _uses(program: Program, shape: ModelShape) -> list[tuple[int, tuple[int, ...]]]:
    """The computations that need parameters, as (position, buckets)."""
    return [
        (position, shape.buckets(instruction.block))
        for position, instruction in enumerate(program)
        if instruction.op in USES_PARAMETERS and instruction.block is not None
    ]


def _for_each(op: Op, compute: Instruction, buckets: list[int] | tuple[int, ...]) -> list[Instruction]:
    return [replace(compute, op=op, block=bucket) for bucket in buckets]
