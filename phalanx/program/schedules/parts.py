"""What schedules are made of: the parts that micro-batches are computed in (their slices in order, or each as a whole),
and how a list of forwards and a list of backwards become one order."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from phalanx.program.instructions import Instruction, Op, Program

Part = tuple[int, int | None]  # micro-batch, slice


def parts_of(num_micro_batches: int, num_slices: Sequence[int]) -> list[list[Part]]:
    """Per micro-batch. num_slices: of each of them; empty where they are not cut."""
    if not num_slices:
        return [[(i, None)] for i in range(num_micro_batches)]
    assert len(num_slices) == num_micro_batches
    return [[(i, j) for j in range(count)] for i, count in enumerate(num_slices)]


def forwards(stage: int, parts: Sequence[Sequence[Part]]) -> list[Instruction]:
    """Of one stage: micro-batches one after the other, each from its first slice to its last."""
    return [Instruction(Op.F, stage, i, slice=j) for i, j in chain.from_iterable(parts)]


def backwards(stage: int, parts: Sequence[Sequence[Part]]) -> list[Instruction]:
    """The same for the backward: each micro-batch from its last slice to its first, which all later ones add to."""
    return [Instruction(Op.BW, stage, i, slice=j) for part in parts for i, j in reversed(part)]


def alternate(forwards: Sequence[Instruction], backwards: Sequence[Sequence[Instruction]], num_ahead: int) -> Program:
    """Each group of backwards after one more forward, `num_ahead` forwards being done before the first pair."""
    ahead = min(num_ahead, len(forwards))
    order = list(forwards[:ahead])
    for i, group in enumerate(backwards):
        order += [*forwards[ahead + i : ahead + i + 1], *group]
    return tuple(order)
