"""What a plan moves to the host between forward and backward, and the op for whose backward it comes back.

A value is kept from forward to backward if a forward wrote it and a backward reads it before anything is written in its
place. It moves with the first op that reads it there. Found by following a program once, by the rules.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from phalanx.plan.plan import Plan
from phalanx.program.instructions import MOVES, Op, Program
from phalanx.program.rules import Key, Place, Rules, place_of
from phalanx.program.shape import ModelShape
from phalanx.program.visits import in_visits

MOVABLE = frozenset(("activation", "saved_b", "saved_bw"))
_FORWARD = frozenset((Op.F, Op.CF, Op.LF, Op.SEND_F, Op.RECV_F))


@dataclass
class Move:
    """What moves for an op's backward. last: the position of the last that touches it in the forward; first: of the
    first that needs it in the backward."""

    last: int
    first: int
    keys: list[Key] = field(default_factory=list[Key])


def moved_of(plan: Plan, shape: ModelShape, program: Program, pp_index: int) -> dict[Place, tuple[Key, ...]]:
    """What the OUTs and INs of a program move."""
    if not any(it.op in MOVES and it.stage is not None for it in program):
        return {}
    plain = tuple(it for it in program if it.op not in MOVES)
    return {place: tuple(move.keys) for place, move in movable(plan, shape, plain, pp_index).items()}


def movable(plan: Plan, shape: ModelShape, program: Program, pp_index: int) -> dict[Place, Move]:
    """What could move in a program without OUT and IN, of the blocks that the plan names."""
    blocks = {b for stage in plan.stages_of(pp_index) for b in plan.offloaded_blocks(stage, shape.layers)}
    touches = _Touches()
    rules = Rules(plan, shape, program, pp_index, touches)
    found: dict[Place, Move] = {}
    kept: dict[Key, int] = {}  # since the forward, with who touched it last
    for position, it in enumerate(program):
        if it.op not in _FORWARD and not in_visits(it):
            continue
        rules.apply(it)
        reads, writes = touches.pop()
        if it.op in _FORWARD:
            kept.update(dict.fromkeys((*(key for key in reads if key in kept), *writes), position))
            continue
        for key in reads:
            if (last := kept.pop(key, None)) is not None and it.block in blocks:
                move = found.setdefault(place_of(it), Move(last, position))
                move.last = max(move.last, last)
                move.keys.append(key)
        for key in writes:
            kept.pop(key, None)
    return found


class _Touches:
    """A sink of the rules that notes which movable values an instruction reads and writes."""

    def __init__(self) -> None:
        self._reads: dict[Key, None] = {}
        self._writes: dict[Key, None] = {}

    def pop(self) -> tuple[Mapping[Key, None], Mapping[Key, None]]:
        found = self._reads, self._writes
        self._reads, self._writes = {}, {}
        return found

    def read(self, key: Key) -> Key:
        if key[0] in MOVABLE:
            self._reads[key] = None
        return key

    def write(
        self, key: Key, size: str = "", memory: Key | None = None, arrives: bool = False, holds: tuple[Key, ...] = ()
    ) -> Key:
        if key[0] in MOVABLE:
            self._writes[key] = None
        return key

    def add(self, key: Key, size: str = "") -> Key:
        return key

    def give(
        self, key: Key, size: str, memory: Key | None = None, arrives: bool = False, holds: tuple[Key, ...] = ()
    ) -> Key:
        return key

    def take(self, key: Key) -> Key | None:
        return None

    def reduce(self, bucket: int, micro_batch: int | None) -> None: ...

    def reduce_further(self, bucket: int) -> None: ...

    def read_sums(self, without: Collection[int] = ()) -> None: ...

    def read_sum(self, bucket: int) -> tuple[Key, ...]:
        return ()

    def read_losses(self) -> None: ...
