"""Reducing gradients over the ranks that have their own share of them, started as soon as nothing more is added; and
summing what other ranks have reduced of the same part."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from itertools import pairwise

from phalanx.program.instructions import Instruction, Op, Program, insert
from phalanx.program.shape import ModelShape

ADDS_TO_GRADIENTS = frozenset((Op.W, Op.BW))
_NOWHERE: dict[str, None] = {"slice": None, "half": None, "op_index": None}  # a bucket belongs to the whole micro-batch


def add_reductions(program: Program, shape: ModelShape, buckets: Collection[int], *, per_micro_batch: bool) -> Program:
    """Reduces each of the buckets after its last contribution: of every micro-batch, or of the step."""
    last: dict[tuple[int, int | None], int] = {}
    for position, instruction in enumerate(program):
        if instruction.op in ADDS_TO_GRADIENTS and instruction.block is not None:
            for bucket in shape.buckets(instruction.block):
                last[bucket, instruction.micro_batch if per_micro_batch else None] = position
    after: defaultdict[int, list[Instruction]] = defaultdict(list)
    for (bucket, _), position in last.items():
        if bucket in buckets:
            after[position].append(program[position]._replace(op=Op.REDUCE, block=bucket, **_NOWHERE))
    return insert(program, {}, after)


def add_sums(program: Program, buckets: Collection[int]) -> Program:
    """Sums each of the buckets once its last reduction has been made: not at once, where the computation would have to
    wait for that, but behind the next bucket's."""
    last = {it.block: position for position, it in enumerate(program) if it.op is Op.REDUCE}
    places = sorted((position, bucket) for bucket, position in last.items() if bucket in buckets)
    after: defaultdict[int, list[Instruction]] = defaultdict(list)
    for (_, bucket), (behind, _) in pairwise([*places, (len(program) - 1, 0)]):
        after[behind].append(Instruction(Op.SUM, block=bucket))
    return insert(program, {}, after)
