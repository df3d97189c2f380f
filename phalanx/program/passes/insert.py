"""Putting instructions around others, for passes that decide per place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from phalanx.program.instructions import Instruction, Program

Additions = Mapping[int, Sequence[Instruction]]  # by the position in the program they are added to


def insert(program: Program, before: Additions, after: Additions) -> Program:
    return tuple(
        instruction
        for position, old in enumerate(program)
        for instruction in (*before.get(position, ()), old, *after.get(position, ()))
    )
