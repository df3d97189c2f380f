"""Binds a lowered program to its values: what every instruction waits for, reads, writes, adds to and frees.

Pure and about one rank; ranks with the same place in their pipeline have the same table. The program is followed once,
in order, by the rules (`rules.py`). A value is freed by the last instruction that touches it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from phalanx.plan.plan import Plan
from phalanx.program.instructions import Instruction, Op, Program, is_fetch
from phalanx.program.moved import moved_of
from phalanx.program.rules import Key, Place, Rules, bucket_of, of_bucket, place_of
from phalanx.program.shape import ModelShape
from phalanx.program.values import RESIDENT, Collect, Row, Table, Value
from phalanx.program.visits import Use, seems_split, use_of

# How many parts of the update may be on their way to the host when these begin.
_LEFT_BEFORE = {Op.OUT: 1, Op.IN: 1, Op.NORM: 0, Op.STEP: 0}
_GRADIENTS_LEFT_BEFORE = 0  # the same when a bucket's gradients leave
IN_FLIGHT = 2  # reductions under way at once where whole gradients are not to be kept (ZeRO 2 and 3)


def bind(plan: Plan, shape: ModelShape, program: Program, pp_index: int) -> Table:
    """The table of a rank at this place of the pipeline; without a backward in the program nothing is saved for one."""
    split = seems_split(program)
    lives = _Lives(plan, shape, split)
    moved = moved_of(plan, shape, program, pp_index)
    rules = Rules(plan, shape, program, pp_index, lives, moved)
    lives.asked = _asked(program, split) if moved else {}
    lives.flat = sorted(rules.flat)
    for instruction in program:
        lives.begin_row(instruction)
        rules.apply(instruction)
        lives.end_row(instruction)
    return lives.finish(keeps_losses=all(it.op is not Op.NORM for it in program))


def _asked(program: Program, split: bool) -> dict[Place, int]:
    """Of activations that come back from the host, how many uses of blocks have begun by then."""
    found: dict[Place, int] = {}
    uses: set[Use] = set()
    for it in program:
        if it.op is Op.IN and it.stage is not None:
            found[place_of(it)] = len(uses)
        elif (use := use_of(it, split)) is not None:
            uses.add(use)
    return found


@dataclass(slots=True)
class _Sum:
    """The gradient of an activation while it is added up: what is there, and what is on its way to it."""

    total: int | None = None
    arriving: list[int] = field(default_factory=list[int])


class _Leaving(NamedTuple):
    """A value on its way to the host. due: the number of uses of blocks by which it is there. micro_batch: of
    activations, which are there when its backward begins."""

    number: int
    due: int | None = None
    micro_batch: int | None = None

    def is_due(self, uses: int, turned: int | None) -> bool:
        return self.due is not None and (self.due <= uses or self.micro_batch == turned)


@dataclass(slots=True)
class _Draft:
    """A row in the making."""

    waits: list[int] = field(default_factory=list[int])
    collects: list[Collect] = field(default_factory=list[Collect])
    reads: list[int] = field(default_factory=list[int])
    writes: list[int] = field(default_factory=list[int])
    adds: list[int] = field(default_factory=list[int])


class _Lives:
    """The lives of all values: a sink of the rules whose ids are places in the table."""

    def __init__(self, plan: Plan, shape: ModelShape, split: bool) -> None:
        self._plan, self._shape, self._split = plan, shape, split
        self.asked: Mapping[Place, int] = {}  # by how many uses of blocks what moved is asked for again
        self.flat: list[int] = []  # buckets whose gradients are not this rank's alone
        self._values: list[Value] = []
        self._last: list[int] = []  # per value, the position of what touches it last
        self._live: dict[Key, int] = {}
        self._written: dict[Key, int] = {}  # how often
        self._sums: dict[Key, _Sum] = {}
        self._shared: set[int] = set()  # memory of several values
        self._pending: dict[int, int] = {}  # what is on its way → position of what brings it
        self._held: dict[int, tuple[int, ...]] = {}  # by what is on its way: what its sender needs until it is here
        self._parts: list[tuple[int, int]] = []  # reductions under way: bucket, what they bring
        self._uses: set[Use] = set()  # of blocks, so far
        self._leaving: list[_Leaving] = []
        self._out: Instruction | None = None  # what the row is of, where that copies to the host
        self._rows: list[Row] = []
        self._row = _Draft()

    def begin_row(self, it: Instruction) -> None:
        """What left long enough ago is waited for where a block is used anew, so that its memory is free again."""
        self._out = it if it.op is Op.OUT else None
        if it.stage is None and it.op in _LEFT_BEFORE and not is_fetch(it):
            self._let_leave(self._most_left_before(it))
        use = use_of(it, self._split) if self._plan.offload else None
        if use is None or use in self._uses:
            return
        turned = it.micro_batch if use[0].op is not Op.F else None  # the micro-batch whose backward has begun
        for leaving in [own for own in self._leaving if own.is_due(len(self._uses), turned)]:
            if leaving.number in self._pending:
                self._arrive(leaving.number)
        self._uses.add(use)
        self._leaving = [leaving for leaving in self._leaving if leaving.number in self._pending]

    def end_row(self, it: Instruction) -> None:
        row, self._row = self._row, _Draft()
        reads = tuple(dict.fromkeys(row.reads)) if len(row.reads) > 1 else tuple(row.reads)
        adds = tuple(dict.fromkeys(row.adds)) if len(row.adds) > 1 else tuple(row.adds)
        self._rows.append(Row(it, tuple(row.waits), tuple(row.collects), reads, tuple(row.writes), adds, ()))

    def finish(self, keeps_losses: bool) -> Table:
        """keeps_losses: losses that no NORM reads are what the program was run for."""
        self._let_arrive()
        frees: list[list[int]] = [[] for _ in (*self._rows, None)]
        for number, value in enumerate(self._values):
            if value.kind not in RESIDENT and not (keeps_losses and value.kind == "loss"):
                frees[self._last[number]].append(number)
        rows = tuple(row._replace(frees=tuple(own)) for row, own in zip(self._rows, frees, strict=False))
        return Table(rows, tuple(self._values))

    def _let_arrive(self) -> None:
        """What is sent again and read by nobody is waited for by the next but one of its kind, or at the end."""
        unread = [i for i, position in self._pending.items() if self._last[i] == position and self._is_new(i)]
        last = len(self._rows) - 1
        behind = [self._last[i] for i in unread[IN_FLIGHT:]] + [last] * IN_FLIGHT
        for number, position in zip(unread, behind, strict=False):
            self._last[number] = position
            for held in self._held.get(number, ()):
                self._last[held] = max(self._last[held], position)
            row = self._rows[position]
            self._rows[position] = row._replace(waits=(*row.waits, number))

    def _let_go(self, key: Key) -> None:
        """What was gathered or fetched and read by nobody, as parameters of a block that learns nothing are for its
        backward, is gone before that is done again."""
        before = self._live.get(key)
        if key[0] in ("gathered", "fetched") and before is not None and before in self._pending:
            del self._pending[before]
            self._last[before] = len(self._rows) - 1
            row = self._rows[-1]
            self._rows[-1] = row._replace(waits=(*row.waits, before))

    def _is_new(self, number: int) -> bool:
        """Whether it is not one of those that outlive a step."""
        return self._values[number].kind not in RESIDENT

    # What rules tell.

    def read(self, key: Key) -> int:
        if key not in self._live:  # there since before the program; or never written, which a check will find
            self._live[key] = self._new(key, "", None)
            if key[0] in RESIDENT:
                self._row.waits.append(self._live[key])  # an earlier step may have left it on its way
        return self._touch(self._live[key], self._row.reads)

    def write(
        self, key: Key, size: str = "", memory: int | None = None, arrives: bool = False, holds: tuple[int, ...] = ()
    ) -> int:
        if key[0] in RESIDENT:  # written where it is
            number = self._add_part(key) if arrives else self.add(key)
        else:
            self._let_go(key)
            number = self._live[key] = self._new(key, size, memory)
            self._row.writes.append(number)
            if key[0] == "gradient":
                self._sums[key] = _Sum(number)
        if arrives:
            self._pending[number] = len(self._rows)
            self._held[number] = holds
            if self._values[number].is_on_host and self._out is not None:
                self._leaving.append(self._leaving_by(self._out, number))
        return number

    def add(self, key: Key, size: str = "") -> int:
        if key not in self._live and key[0] not in RESIDENT:
            return self.write(key, size)
        if key not in self._live:
            self.read(key)
        return self._touch(self._live[key], self._row.adds)

    def _add_part(self, key: Key) -> int:
        """To what is on its way in parts, each of which goes by itself: whoever reads it waits for all."""
        if (number := self._live.get(key)) is None or number not in self._pending:
            return self.add(key)
        self._row.adds.append(number)
        self._last[number] = len(self._rows)
        return number

    def give(
        self, key: Key, size: str, memory: int | None = None, arrives: bool = False, holds: tuple[int, ...] = ()
    ) -> int:
        """What is computed here is added at once, what is on its way when the sum is read."""
        found = self._sums.setdefault(key, _Sum())
        if arrives:
            number = self._new(key, size, None, part=len(found.arriving) + 1)
            self._row.writes.append(number)
            self._pending[number], self._held[number] = len(self._rows), holds
            found.arriving.append(number)
            return number
        if found.total is None:
            found.total = self._live[key] = self._new(key, size, memory)
            self._row.writes.append(found.total)
        else:
            self._add_to(key, found)
        return found.total

    def take(self, key: Key) -> int | None:
        found = self._sums.get(key)
        if found is None:
            return None
        if found.total is None:
            found.total = self._live[key] = found.arriving.pop(0)
        if found.arriving:
            parts, found.arriving = tuple(found.arriving), []
            for number in parts:
                self._touch(number, self._row.reads)
            before, total = found.total, self._add_to(key, found)
            self._row.collects.append((total, parts if total == before else (before, *parts)))
        return self._touch(found.total, self._row.reads)

    def reduce(self, bucket: int, micro_batch: int | None) -> None:
        key = of_bucket("d_parameters", bucket)
        if key not in self._live:
            self.add(key)  # nothing was added here: zeros are reduced
        gradients = self.read(key)
        while self._plan.zero >= 2 and len(self._parts) >= IN_FLIGHT:
            self._collect(*self._parts.pop(0))
        del self._live[key]
        # Without ZeRO the sum is made where the gradients are.
        memory = None if self._plan.zero else gradients
        part = self.write(("reduced", str(bucket), micro_batch, None, None, None), "", memory, True, (gradients,))
        self._parts.append((bucket, part))

    def reduce_further(self, bucket: int) -> None:
        """In place: the sum is on its way again."""
        total = self._total(bucket)
        self._row.adds.append(total)
        self._pending[total] = len(self._rows)

    def read_sums(self, without: Collection[int] = ()) -> None:
        for bucket in self.flat:
            if bucket not in without:
                self._total(bucket)
        for key in [key for key in self._live if key[0] == "d_parameters" and int(bucket_of(key)) not in without]:
            self.read(key)

    def read_sum(self, bucket: int) -> tuple[int, ...]:
        if bucket in self.flat:
            return (self._total(bucket),)
        own = [key for key in self._live if key[0] == "d_parameters" and bucket_of(key) == str(bucket)]
        return tuple(self.read(key) for key in own)

    def read_losses(self) -> None:
        for key in [key for key in self._live if key[0] == "loss"]:
            self.read(key)

    def _leaving_by(self, it: Instruction, number: int) -> _Leaving:
        """Activations have the way to the host for themselves for so many uses; some more are a reserve for when it is
        shared, as far as they are not asked for again. Gradients and state are waited for by those that leave after
        them."""
        if it.stage is None:
            return _Leaving(number)
        uses = self._plan.uses_to_leave(it.stage, self._shape.layers)
        reserve = self._plan.mb // 4 if self._plan.schedule == "block-major" else uses // 2
        due = len(self._uses) + uses + reserve
        return _Leaving(number, min(due, self.asked.get(place_of(it), due + 1) - 1), it.micro_batch)

    def _most_left_before(self, it: Instruction) -> int:
        if it.op is Op.STEP and it.block is not None:
            return len(self._leaving)
        return _GRADIENTS_LEFT_BEFORE if it.op is Op.OUT and it.op_index is None else _LEFT_BEFORE[it.op]

    def _let_leave(self, most: int) -> None:
        """Waits for what is on its way to the host, the oldest first."""
        while len(self._leaving) > most:
            number = self._leaving.pop(0).number
            if number in self._pending:
                self._arrive(number)

    # Lives.

    def _new(self, key: Key, size: str, memory: int | None, part: int = 0) -> int:
        number = len(self._values)
        if memory is not None:
            memory = self._values[memory].memory
            self._shared.add(memory)
        version = 0
        if not part:
            version = self._written.get(key, 0)
            self._written[key] = version + 1
        self._values.append(Value(*key, version, part, size, number if memory is None else memory))
        self._last.append(len(self._rows))
        return number

    def _add_to(self, key: Key, found: _Sum) -> int:
        """Adds to a sum. Where others read its memory, the sum is a new value."""
        assert found.total is not None
        if self._values[found.total].memory in self._shared:
            before = self._touch(found.total, self._row.reads)
            found.total = self._live[key] = self._new(key, self._values[before].size, None)
            self._row.writes.append(found.total)
        else:
            self._touch(found.total, self._row.adds)
        return found.total

    def _total(self, bucket: int) -> int:
        """A bucket's sum over ranks, with everything that was on its way to it; what was never reduced is as it is."""
        for own in [own for own in self._parts if own[0] == bucket]:
            self._parts.remove(own)
            self._collect(*own)
        key: Key = of_bucket("reduced", bucket)
        if key not in self._live:
            alone = of_bucket("d_parameters", bucket)
            if alone not in self._live:
                self.add(alone)
            self._live[key] = self._live.pop(alone)
        return self._touch(self._live[key], self._row.reads)

    def _collect(self, bucket: int, part: int) -> None:
        """What a reduction brought becomes the sum, or is added to it."""
        key: Key = of_bucket("reduced", bucket)
        self._touch(part, self._row.reads)
        if key in self._live:
            total = self._touch(self._live[key], self._row.adds)
            self._row.collects.append((total, (part,)))
        else:
            self._live[key] = part

    def _touch(self, number: int, how: list[int]) -> int:
        """Whoever touches what is on its way waits for it, and then its sender needs no more what it sent."""
        how.append(number)
        here = len(self._rows)
        self._last[number] = here
        if number in self._pending and self._pending[number] != here:
            self._arrive(number)
        return number

    def _arrive(self, number: int) -> None:
        del self._pending[number]
        self._row.waits.append(number)
        for held in self._held.pop(number, ()):
            self._last[held] = max(self._last[held], len(self._rows))
