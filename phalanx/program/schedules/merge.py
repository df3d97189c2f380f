"""One forward, one backward: how a list of forwards and a list of backwards become one order."""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.program.instructions import Instruction, Program


def alternate(forwards: Sequence[Instruction], backwards: Sequence[Sequence[Instruction]], num_ahead: int) -> Program:
    """Each group of backwards after one more forward, `num_ahead` forwards being done before the first pair."""
    ahead = min(num_ahead, len(forwards))
    order = list(forwards[:ahead])
    for i, group in enumerate(backwards):
        order += [*forwards[ahead + i : ahead + i + 1], *group]
    return tuple(order)
