"""Visits: what the schedule says in one word (`F1.2`, `BW1.2.0`) is lowered to many instructions, and belongs together.

A fused backward (`BW`) becomes B and W of single segments where a collective travels behind the W; a schedule that
splits the two has visits of their own for them. Which one a program follows cannot always be seen in it, so it is said.
"""

from __future__ import annotations

from collections.abc import Iterable

from phalanx.program.instructions import COMPUTE, LOCAL_REDISTRIBUTIONS, REDISTRIBUTIONS, Instruction, Op, Program

_FORWARD = frozenset((Op.F, Op.CF, Op.LF))
_IN_VISITS = COMPUTE | REDISTRIBUTIONS | LOCAL_REDISTRIBUTIONS


def in_visits(instruction: Instruction) -> bool:
    return instruction.op in _IN_VISITS


def visit_of(instruction: Instruction, split: bool) -> Instruction:
    """The word of the short view that a computation or redistribution carries out. split: B and W are words of their
    own."""
    op = instruction.op
    if op in _FORWARD:
        op = Op.F
    elif not split:
        op = Op.BW
    elif op is not Op.W:
        op = Op.B
    return instruction._replace(op=op, block=None, half=None, op_index=None)


Use = tuple[Instruction, int | None]


def use_of(instruction: Instruction, split: bool) -> Use | None:
    """What a visit does with one block, of which a computation or redistribution is part."""
    return (visit_of(instruction, split), instruction.block) if instruction.op in _IN_VISITS else None


def is_split(orders: Iterable[Program]) -> bool:
    """Whether a schedule, in the short view, orders the gradients of weights by themselves."""
    return any(instruction.op is Op.W for order in orders for instruction in order)


def seems_split(program: Program) -> bool:
    """The same of one lowered program: no backward is fused, and no W comes before the B of another segment's visit."""
    pending: set[tuple[int | None, int | None, int | None]] = set()
    for instruction in program:
        place = (instruction.stage, instruction.micro_batch, instruction.slice)
        if instruction.op is Op.BW or (instruction.op is Op.B and place in pending):
            return False
        if instruction.op is Op.W:
            pending.add(place)
    return True
