"""Rules about what ranks of a pipeline do together: messages match, collectives come in one order, nobody waits for
ever.

Ranks that differ only in whom they talk to have the same program, so one pipeline is looked at; what such ranks do
among themselves is in order because their programs are the same.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from phalanx.plan.plan import Plan
from phalanx.program.check_values import Broken
from phalanx.program.holders import holders
from phalanx.program.instructions import RECEIVES, SENDS, Instruction, Op, Program
from phalanx.program.shape import ModelShape
from phalanx.program.values import Table

Channel = tuple[Op, int, int]  # RECV_F or RECV_B, sender, receiver
Placed = tuple[int, Instruction]  # position in its program
MAX_SHOWN = 4


def check_messages(programs: Sequence[Program]) -> None:
    """On every channel the same messages in the same order at both ends: they carry no names."""
    sent: defaultdict[Channel, list[Placed]] = defaultdict(list)
    received: defaultdict[Channel, list[Placed]] = defaultdict(list)
    for index, program in enumerate(programs):
        for position, it in enumerate(program):
            if it.op in SENDS:
                sent[arrival_of(it, index).op, index, _peer(it)].append((position, it))
            elif it.op in RECEIVES:
                received[it.op, _peer(it), index].append((position, it))
    for channel in sorted(sent.keys() | received.keys()):
        _check_channel(channel, sent[channel], received[channel])


def _check_channel(channel: Channel, sent: list[Placed], received: list[Placed]) -> None:
    _, sender, receiver = channel
    arrivals = [arrival_of(send, sender) for _, send in sent]
    for position, receive in received:
        if receive not in arrivals:
            raise Broken(f"waits for {receive}, which rank {sender} never sends", receiver, position)
    posted = {receive for _, receive in received}
    for (position, send), arrival in zip(sent, arrivals):
        if arrival not in posted:
            raise Broken(f"has {send}, which rank {receiver} never receives", sender, position)
    for arrival, (position, receive), (_, send) in zip(arrivals, received, sent):
        if arrival != receive:
            words = f"posts {receive} where rank {sender} sends {send}: the order must be the same at both ends"
            raise Broken(words, receiver, position)


def arrival_of(send: Instruction, sender: int) -> Instruction:
    """The receive that takes what `send` sends."""
    assert send.stage is not None
    op, step = (Op.RECV_F, 1) if send.op is Op.SEND_F else (Op.RECV_B, -1)
    return Instruction(op, send.stage + step, send.micro_batch, peer=sender, half=send.half, slice=send.slice)


def check_ties(plan: Plan, shape: ModelShape, programs: Sequence[Program]) -> None:
    """Stages that hold the same buckets sum them in the same order."""
    for bucket in range(shape.num_blocks, shape.num_buckets):
        first, *others = holders(plan, shape, bucket) or (0,)
        group = (first, *others)
        ours = [it for it in programs[first] if it.op is Op.TIE and _group(plan, shape, it) == group]
        for index in others:
            theirs = [it for it in programs[index] if it.op is Op.TIE and _group(plan, shape, it) == group]
            if ours != theirs:
                words = f"sums {_shown(theirs)} where rank {first} sums {_shown(ours)}: the order must be the same"
                raise Broken(words, index)


def check_progress(plan: Plan, shape: ModelShape, tables: Sequence[Table]) -> None:
    """Run by all ranks at once, the programs come to their end. A collective waits here until all members have issued
    it, although the engine only waits for its result, so that the proof holds for links that block as well."""
    _Execution(plan, shape, tables).run()


class _Execution:
    """Where every rank is, and what it has given to the others."""

    def __init__(self, plan: Plan, shape: ModelShape, tables: Sequence[Table]) -> None:
        self._plan, self._shape, self._rows = plan, shape, [table.rows for table in tables]
        self._position = [0] * len(tables)
        self._arrived: set[tuple[int, Instruction]] = set()  # receiver, its receive
        self._issued: defaultdict[tuple[object, ...], set[int]] = defaultdict(set)
        self._brought = [_brought(table) for table in tables]

    def run(self) -> None:
        while any([self._advance(index) for index in range(len(self._rows))]):
            pass
        stuck = [index for index, rows in enumerate(self._rows) if self._position[index] < len(rows)]
        if stuck:
            waits = "; ".join(self._wait_in_words(index) for index in stuck[:MAX_SHOWN])
            more = f"; and {len(stuck) - MAX_SHOWN} more" if len(stuck) > MAX_SHOWN else ""
            raise Broken(f"deadlock: {waits}{more}", stuck[0], self._position[stuck[0]])

    def _advance(self, index: int) -> bool:
        """Runs a rank until it must wait; whether it did anything."""
        before, rows = self._position[index], self._rows[index]
        while self._position[index] < len(rows) and self._can_pass(index):
            self._position[index] += 1
        return before != self._position[index]

    def _can_pass(self, index: int) -> bool:
        it = self._rows[index][self._position[index]].instruction
        if it.op in SENDS:
            self._arrived.add((_peer(it), arrival_of(it, index)))
        if self._missing(index) is not None:
            return False
        group = _group(self._plan, self._shape, it)
        if group is None:
            return True
        issued = self._issued[it, group]
        issued.add(index)
        return len(issued) == len(group)

    def _missing(self, index: int) -> Instruction | None:
        """The receive that has to come before the instruction at which a rank is."""
        for value in self._rows[index][self._position[index]].waits:
            receive = self._brought[index].get(value)
            if receive is not None and (index, receive) not in self._arrived:
                return receive
        return None

    def _wait_in_words(self, index: int) -> str:
        it = self._rows[index][self._position[index]].instruction
        receive = self._missing(index)
        if receive is not None:
            return f"rank {index} waits for {receive} to run {it}"
        group = _group(self._plan, self._shape, it) or ()
        return f"rank {index} waits in {it} for the ranks {', '.join(map(str, group))}"


def _brought(table: Table) -> dict[int, Instruction]:
    """The values that messages bring."""
    return {i: row.instruction for row in table.rows if row.instruction.op in RECEIVES for i in row.writes}


def _group(plan: Plan, shape: ModelShape, it: Instruction) -> tuple[int, ...] | None:
    """The ranks of the pipeline that do something together; None: what others do does not matter to it."""
    if it.op is Op.NORM:
        return tuple(range(plan.pp))
    return holders(plan, shape, it.block) if it.op is Op.TIE and it.block is not None else None


def _shown(instructions: Sequence[Instruction]) -> str:
    return " ".join(map(str, instructions)) or "nothing"


def _peer(it: Instruction) -> int:
    assert it.peer is not None
    return it.peer
