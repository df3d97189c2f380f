"""ZB-V: each rank holds one stage on the way down and one on the way up, so the last stage is next to the data.

The order is found, not written down: in unit times for F, B and W every rank does what is most urgent, with at most
2 pp pieces of work open at once (forward done, weight gradient not). Stages being half as large, that is the memory of
1F1B's first rank, here on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from phalanx.program.instructions import Instruction, Op, Program


def zb_v(pp: int, v: int, num_micro_batches: int) -> tuple[Program, ...]:
    assert v == 2
    work = _Work(pp, num_micro_batches)
    while any(len(order) < 6 * num_micro_batches for order in work.orders):
        work.tick()
    return tuple(tuple(order) for order in work.orders)


@dataclass
class _Work:
    """What has been done so far by all ranks together, which take their next piece at the same time."""

    pp: int
    num_micro_batches: int
    orders: list[list[Instruction]] = field(init=False)
    done: set[Instruction] = field(default_factory=set[Instruction])

    def __post_init__(self) -> None:
        self.orders = [[] for _ in range(self.pp)]
        self._count: dict[tuple[Op, int], int] = {}  # micro-batches done per kind of work and stage

    def tick(self) -> None:
        chosen = [self._most_urgent(pp_index) for pp_index in range(self.pp)]
        assert any(chosen), "no rank can go on"
        for order, piece in zip(self.orders, chosen):
            if piece is not None:
                order.append(piece)
                self.done.add(piece)
                assert piece.stage is not None
                self._count[piece.op, piece.stage] = self._num_done(piece.op, piece.stage) + 1

    def _most_urgent(self, pp_index: int) -> Instruction | None:
        """Others wait for B, then for F, for W nobody; the stage nearer to the loss comes first."""
        down, up = pp_index, 2 * self.pp - 1 - pp_index
        for op in (Op.B, Op.F, Op.W):
            if op is Op.F and self._num_open(down) + self._num_open(up) == 2 * self.pp:
                continue
            for stage in (up, down):
                piece = Instruction(op, stage, self._num_done(op, stage))
                if self._num_done(op, stage) < self.num_micro_batches and self._is_ready(piece):
                    return piece
        return None

    def _is_ready(self, piece: Instruction) -> bool:
        op, stage, i = piece.op, piece.stage, piece.micro_batch
        assert stage is not None
        if op is Op.F:
            return stage == 0 or Instruction(Op.F, stage - 1, i) in self.done
        if op is Op.W:
            return Instruction(Op.B, stage, i) in self.done
        last = stage == 2 * self.pp - 1
        return Instruction(Op.F, stage, i) in self.done and (last or Instruction(Op.B, stage + 1, i) in self.done)

    def _num_done(self, op: Op, stage: int) -> int:
        return self._count.get((op, stage), 0)

    def _num_open(self, stage: int) -> int:
        return self._num_done(Op.F, stage) - self._num_done(Op.W, stage)
