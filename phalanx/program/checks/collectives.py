"""Rules about collectives between ranks: all members of a group issue the same ones on it, in the same order."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import zip_longest

from phalanx.program.checks.scope import Broken, Scope
from phalanx.program.groups import Group, group_of
from phalanx.program.instructions import COLLECTIVES, EXCHANGES, Instruction, Op, Program

Placed = tuple[int, Instruction]  # position in its program
_PER_BLOCK = EXCHANGES | {Op.TIE, Op.REDUCE, Op.SUM}


class Groups:
    """`group_of`, remembered for each rank, kind of collective and, where it matters, bucket or step."""

    def __init__(self, scope: Scope) -> None:
        self._scope = scope
        self._known: dict[tuple[int, Op, int | None, int | None], Group] = {}

    def of(self, rank: int, instruction: Instruction) -> Group:
        key = (rank, instruction.op, instruction.block if instruction.op in _PER_BLOCK else None, instruction.step)
        if key not in self._known:
            self._known[key] = group_of(self._scope.plan, self._scope.shape, rank, instruction)
        return self._known[key]


def check_collectives(groups: Groups, programs: Sequence[Program]) -> None:
    issued: defaultdict[Group, dict[int, list[Placed]]] = defaultdict(dict)
    for rank, program in enumerate(programs):
        for position, instruction in enumerate(program):
            if instruction.op in COLLECTIVES:
                issued[groups.of(rank, instruction)].setdefault(rank, []).append((position, instruction))
    for group, sequences in issued.items():
        for member in group[1:]:
            _compare(group, group[0], sequences.get(group[0], []), member, sequences.get(member, []))


def _compare(group: Group, first: int, ours: list[Placed], member: int, theirs: list[Placed]) -> None:
    where = "on the group of ranks " + ", ".join(map(str, group))
    for mine, other in zip_longest(ours, theirs):
        if other is None:
            raise Broken(f"rank {member} never issues {mine[1]} {where}, which rank {first} does", member)
        if mine is None:
            raise Broken(f"rank {first} never issues {other[1]} {where}, which rank {member} does", first)
        if mine[1] != other[1]:
            words = f"rank {member} issues {other[1]} {where}, where rank {first} issues {mine[1]}"
            raise Broken(f"{words}: the order must be the same on all", member, other[0])
