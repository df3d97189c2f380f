"""Reducing gradients over the ranks that have their own share of them, started as soon as nothing more is added; and
summing what other ranks have reduced of the same part."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable
from itertools import pairwise

from phalanx.errors import PlanError
from phalanx.plan.plan import Plan
from phalanx.program.instructions import Instruction, Op, Program, insert
from phalanx.program.shape import ModelShape

ADDS_TO_GRADIENTS = frozenset((Op.W, Op.BW))
MOST_ADDED = 2**13  # gradients of one parameter whose sum is exact (`params/exact.py`)
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


def check_sums(programs: Iterable[Program], plan: Plan, shape: ModelShape) -> None:
    """Refuses to promise a sum of more gradients than can be added without rounding."""
    if not plan.sums_exactly:
        return
    added = Counter(
        bucket
        for program in programs
        for it in program
        if it.op in ADDS_TO_GRADIENTS and it.block is not None
        for bucket in shape.buckets(it.block)
    )
    most = max(added.values(), default=0) * plan.dp * plan.tp
    if most > MOST_ADDED:
        raise PlanError(
            f"plan: sums=exact adds up to {MOST_ADDED:,} gradients of a parameter without rounding, and this plan has "
            f"{most:,} of them",
            "use fewer and larger micro-batches, a smaller batch, or leave sums out",
        )
