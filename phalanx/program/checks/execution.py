"""Rules about waiting: run by all ranks at once, the programs come to their end.

A computation or exchange waits until what it receives has been sent; a collective waits until all members have issued
it, although the engine only waits for its result, so that the proof holds for links that block as well.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from phalanx.program.checks.collectives import Groups
from phalanx.program.checks.messages import arrival_of
from phalanx.program.checks.scope import FORWARD, Broken, Scope
from phalanx.program.groups import Group
from phalanx.program.instructions import COLLECTIVES, SENDS, Instruction, Op, Program

MAX_SHOWN = 4
_RECEIVING = FORWARD | {Op.B, Op.BW, Op.CB}


class Execution:
    """Where every rank is, and what it has given to the others."""

    def __init__(self, scope: Scope, groups: Groups, programs: Sequence[Program]) -> None:
        self._scope, self._groups, self._programs = scope, groups, programs
        self._position = [0] * len(programs)
        self._arrived: set[tuple[int, Instruction]] = set()  # receiver, its receive
        self._issued: Counter[Group] = Counter()  # calls of all members together
        self._calls = [Counter[Group]() for _ in programs]
        self._entered = [False] * len(programs)  # whether the rank has called the collective at its position

    def run(self) -> None:
        while any([self._advance(rank) for rank in range(len(self._programs))]):
            pass
        stuck = [rank for rank, program in enumerate(self._programs) if self._position[rank] < len(program)]
        if stuck:
            waits = "; ".join(self._wait_in_words(rank) for rank in stuck[:MAX_SHOWN])
            more = f"; and {len(stuck) - MAX_SHOWN} more" if len(stuck) > MAX_SHOWN else ""
            raise Broken(f"deadlock: {waits}{more}", stuck[0], self._position[stuck[0]])

    def _advance(self, rank: int) -> bool:
        """Runs a rank until it must wait; whether it did anything."""
        before = (self._position[rank], self._entered[rank])
        program = self._programs[rank]
        while self._position[rank] < len(program) and self._can_pass(rank, program[self._position[rank]]):
            self._position[rank] += 1
        return before != (self._position[rank], self._entered[rank])

    def _can_pass(self, rank: int, instruction: Instruction) -> bool:
        if instruction.op in SENDS:
            assert instruction.peer is not None
            self._arrived.add((instruction.peer, arrival_of(instruction, rank)))
        receive = self._needed(rank, instruction)
        if receive is not None and (rank, receive) not in self._arrived:
            return False
        return self._pass_collective(rank, instruction) if instruction.op in COLLECTIVES else True

    def _needed(self, rank: int, it: Instruction) -> Instruction | None:
        """The receive that a computation or exchange waits for."""
        if it.op not in _RECEIVING or it.stage is None or it.block != self._scope.first_block(it.op, it):
            return None
        return self._scope.receive_of(rank, it.op, it)

    def _pass_collective(self, rank: int, instruction: Instruction) -> bool:
        group = self._groups.of(rank, instruction)
        if not self._entered[rank]:
            self._entered[rank] = True
            self._issued[group] += 1
            self._calls[rank][group] += 1
        # Members call in the same order, so all are here once they have made this many calls together.
        if self._issued[group] < self._calls[rank][group] * len(group):
            return False
        self._entered[rank] = False
        return True

    def _wait_in_words(self, rank: int) -> str:
        instruction = self._programs[rank][self._position[rank]]
        receive = self._needed(rank, instruction)
        if receive is not None and (rank, receive) not in self._arrived:
            return f"rank {rank} waits for {receive} to run {instruction}"
        group = self._groups.of(rank, instruction)
        return f"rank {rank} waits in {instruction} for the ranks {', '.join(map(str, group))}"
