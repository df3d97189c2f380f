"""Rules about values on one rank: each is written before it is read, complete when it is taken, and freed once.

Every row of a table is held against what its instruction means (`rules.py`), so that nothing can be left out of it or
put into it; then the values are followed from row to row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from phalanx.plan.plan import Plan
from phalanx.program.instructions import Instruction, Op
from phalanx.program.moved import moved_of
from phalanx.program.rules import Key, Rules, bucket_of, of_bucket
from phalanx.program.shape import ModelShape
from phalanx.program.values import HOST, RESIDENT, Row, Table

MAX_BLOCKS = 2  # gathered at once where parameters are gathered for a micro-batch: those in use and the next ones


class Broken(Exception):
    """A rule is broken at a place: a position in a program, or its end where something is missing."""

    def __init__(self, words: str, index: int, position: int | None = None) -> None:
        super().__init__(words)
        self.words, self.index, self.position = words, index, position


@dataclass(slots=True)
class _Meaning:
    """What an instruction does, by the names of values."""

    reads: set[Key] = field(default_factory=set[Key])
    writes: set[Key] = field(default_factory=set[Key])
    adds: set[Key] = field(default_factory=set[Key])
    gives: list[Key] = field(default_factory=list[Key])
    takes: set[Key] = field(default_factory=set[Key])
    arrives: set[Key] = field(default_factory=set[Key])
    holds: dict[Key, tuple[Key, ...]] = field(default_factory=dict[Key, tuple[Key, ...]])
    sums: str = (
        ""  # what it does with the sums of parameters' gradients: reduce, further, one (reads a bucket's) or all
    )
    without: frozenset[str] = frozenset()  # the buckets that are not among all


class _Notes:
    """A sink of the rules that only notes the names."""

    def __init__(self) -> None:
        self.found = _Meaning()
        self._given: set[Key] = set()  # gradients that got anything: what comes to nothing is not sent on

    def read(self, key: Key) -> Key:
        self.found.reads.add(key)
        return key

    def write(
        self, key: Key, size: str = "", memory: Key | None = None, arrives: bool = False, holds: tuple[Key, ...] = ()
    ) -> Key:
        (self.found.adds if key[0] in RESIDENT else self.found.writes).add(key)
        self._given.add(key)
        if arrives:
            self.found.arrives.add(key)
            self.found.holds[key] = holds
        return key

    def add(self, key: Key, size: str = "") -> Key:
        self.found.adds.add(key)
        return key

    def give(
        self, key: Key, size: str, memory: Key | None = None, arrives: bool = False, holds: tuple[Key, ...] = ()
    ) -> Key:
        self.found.gives.append(key)
        self._given.add(key)
        if arrives:
            self.found.arrives.add(key)
            self.found.holds[key] = holds
        return key

    def take(self, key: Key) -> Key | None:
        self.found.takes.add(key)
        return key if key in self._given else None

    def reduce(self, bucket: int, micro_batch: int | None) -> None:
        self.found.sums = "reduce"
        gradients, reduced = of_bucket("d_parameters", bucket), ("reduced", str(bucket), micro_batch, None, None, None)
        self.found.reads.add(gradients)
        self.found.writes.add(reduced)
        self.found.arrives.add(reduced)
        self.found.holds[reduced] = (gradients,)

    def reduce_further(self, bucket: int) -> None:
        self.found.sums = "further"

    def read_sums(self, without: Collection[int] = ()) -> None:
        self.found.sums, self.found.without = "all", frozenset(map(str, without))

    def read_sum(self, bucket: int) -> tuple[Key, ...]:
        self.found.sums = "one"
        return ()

    def read_losses(self) -> None:
        pass


def check_values(plan: Plan, shape: ModelShape, index: int, table: Table) -> None:
    """Raises Broken unless the table of the rank at this place of the pipeline is sound."""
    _Follower(plan, shape, index, table).run()


class _Follower:
    def __init__(self, plan: Plan, shape: ModelShape, index: int, table: Table) -> None:
        self._plan, self._index, self._table = plan, index, table
        self._keys: list[Key] = [value[:6] for value in table.values]
        program = tuple(row.instruction for row in table.rows)
        self._notes = _Notes()
        self._rules = Rules(plan, shape, program, index, self._notes, moved_of(plan, shape, program, index))
        self._meanings = [self._meaning(it) for it in program]
        self._to_give = Counter(key for m in self._meanings for key in m.gives)
        self._to_give.update(key for m in self._meanings for key in m.writes if key[0] == "gradient")
        self._to_add: Counter[tuple[str, int | None]] = Counter()  # of each bucket and micro-batch
        for it, meaning in zip(program, self._meanings):
            self._to_add.update((bucket_of(key), it.micro_batch) for key in meaning.adds if key[0] == "d_parameters")
        self._written: set[int] = {i for i, value in enumerate(table.values) if value.kind in RESIDENT}
        self._freed: set[int] = set()
        self._gone: set[int] = set()  # to the host
        self._pending: set[int] = set()
        self._given: Counter[Key] = Counter()
        self._added: Counter[tuple[str, int | None]] = Counter()
        self._gathered: set[int] = set()
        self._held: dict[int, set[int]] = {}  # by what is on its way
        self._sending: Counter[int] = Counter()  # how many of those need it
        self._collected: set[int] = set()
        self._touched: set[int] = set()
        self._reduced = {i for i, value in enumerate(table.values) if value.kind == "reduced"}
        self._parameters_arrive = plan.zero in (1, 2) or plan.steps_on_host or plan.hosts_parameters
        self._brought = "gathered" if plan.gathers == "micro-batch" else "fetched" if plan.hosts_parameters else ""
        self._ends = Op.NORM in {it.op for it in program}
        self._num_slices: Counter[Key] = Counter()  # of each past, how many slices write it
        self._passed: Counter[tuple[Key, bool]] = Counter()  # slices that wrote it, or came back
        for it, meaning in zip(program, self._meanings):
            if it.op is Op.F:
                self._num_slices.update(key for key in meaning.adds if key[0] == "past")

    def _meaning(self, it: Instruction) -> _Meaning:
        self._notes.found = _Meaning()
        self._rules.apply(it)
        return self._notes.found

    def run(self) -> None:
        for position, (row, meaning) in enumerate(zip(self._table.rows, self._meanings)):
            words = None if self._is_as_meant(row, meaning) else next(self._named(row, meaning), None)
            if words is None:
                words = next(self._follow(row, meaning), None)
            if words is not None:
                raise Broken(f"{words} at {row.instruction}", self._index, position)
        for_good = RESIDENT if self._ends else RESIDENT | {"loss"}  # a loss that no NORM reads is what was asked for
        kept = {i for i, value in enumerate(self._table.values) if value.kind in for_good}
        left = self._written - self._freed - kept
        if left:
            raise Broken(f"never frees {self._name(min(left))}", self._index)

    # Against what the instruction means.

    def _is_as_meant(self, row: Row, meaning: _Meaning) -> bool:
        """Whether it plainly does that and no more. Where not, `_named` tells what is wrong, if anything is."""
        keys, to_give = self._keys, self._to_give
        reads, writes, adds = [keys[i] for i in row.reads], [keys[i] for i in row.writes], [keys[i] for i in row.adds]
        taken = [key for key in meaning.takes if key in to_give]
        wanted = meaning.reads.union(taken) if taken else meaning.reads
        made = {*writes, *adds}
        return (
            len(reads) == len(wanted) == len(wanted.intersection(reads))
            and len(made) == len(writes) + len(adds)
            and meaning.writes.issubset(writes)
            and made == meaning.writes.union(meaning.adds, meaning.gives)
            and len(set(row.frees)) == len(row.frees)
            and len(set(row.waits)) == len(row.waits)
        )

    def _named(self, row: Row, meaning: _Meaning) -> Iterator[str]:
        keys = self._keys
        reads, writes, adds = ([keys[i] for i in ids] for ids in (row.reads, row.writes, row.adds))
        taken = {key for key in meaning.takes if self._to_give[key]}
        given = set(meaning.gives)
        made = {*writes, *adds}
        yield from (f"does not read {_named(key)}" for key in (meaning.reads | taken).difference(reads))
        yield from (f"does not write {_named(key)}" for key in meaning.writes.difference(writes))
        yield from (f"adds nothing to {_named(key)}" for key in (meaning.adds | given).difference(made))
        if not meaning.sums:
            useful = meaning.reads | taken | given | meaning.adds
            yield from (f"reads {_named(key)}, for which it has no use," for key in set(reads) - useful)
            own = meaning.writes | meaning.adds | given | {keys[total] for total, _ in row.collects}
            yield from (f"writes {_named(key)}, of which it makes nothing," for key in made - own)
        for name in ("reads", "writes", "adds", "frees", "waits"):
            ids = getattr(row, name)
            if len(set(ids)) < len(ids):
                yield f"{name} {self._name(next(i for i in ids if ids.count(i) > 1))} twice"
        if len(set(writes)) < len(writes):
            several = (key for key in writes if writes.count(key) > max(1, meaning.gives.count(key)))
            yield from (f"writes {_named(key)} more than once" for key in several)

    # From row to row.

    def _follow(self, row: Row, meaning: _Meaning) -> Iterator[str]:
        written, new = self._written, row.writes
        if row.waits:
            yield from self._arrived(row)
        for i in new:
            if i in written:
                yield f"writes {self._name(i)} twice"
        parts = [i for i in row.adds if self._keys[i] in meaning.arrives and i not in row.reads]  # of what is under way
        for i in (*row.reads, *(i for i in row.adds if i not in parts), *new):
            if i in self._freed or i in self._pending or i in self._gone or (i not in written and i not in new):
                yield from self._misused(i, new)
        if meaning.takes or meaning.sums:
            yield from self._incomplete(row, meaning)
        if meaning.adds:
            yield from self._out_of_order(row, meaning)
        if row.collects or meaning.sums or self._parameters_arrive or not self._reduced.isdisjoint(row.frees):
            yield from self._lost(row, meaning)
        if self._parameters_arrive:
            self._touched.update(row.reads, row.adds)
        if row.instruction.op is Op.OUT:
            self._gone.update(row.reads)
        written.update(new)
        self._count(row.instruction, meaning)
        if meaning.arrives or meaning.sums:
            self._set_out(row, meaning)
        if self._brought:
            yield from self._too_many(row)
        for i in row.frees:
            if i in self._freed:
                yield f"frees {self._name(i)} again"
            if i not in written:
                yield f"frees {self._name(i)}, which was never written,"
            if self._sending and self._sending[i] > 0:
                yield f"frees {self._name(i)}, which is still being sent,"
        self._freed.update(row.frees)

    def _arrived(self, row: Row) -> Iterator[str]:
        for i in row.waits:
            self._pending.discard(i)
            sent = self._held.pop(i, set[int]())
            self._sending.subtract(sent)
            made_room = sent and self._table.values[i].is_on_host  # of what went to the host, nobody need read it yet
            if not made_room and i not in (*row.reads, *row.adds, *row.frees) and self._keys[i][0] not in RESIDENT:
                yield f"waits for {self._name(i)} and does nothing with it"

    def _misused(self, i: int, new: Collection[int]) -> Iterator[str]:
        if i in self._freed:
            yield f"uses {self._name(i)}, which was freed,"
        if i not in self._written and i not in new:
            yield f"uses {self._name(i)} before it is written"
        if i in self._pending:
            yield f"uses {self._name(i)} without waiting for it"
        if i in self._gone:
            yield f"uses {self._name(i)}, which went to the host,"

    def _count(self, it: Instruction, meaning: _Meaning) -> None:
        """What was added to gradients so far."""
        for key in meaning.gives:
            self._given[key] += 1
        for key in meaning.writes:
            if key[0] == "gradient":
                self._given[key] += 1
        for key in meaning.adds:
            if key[0] == "d_parameters":
                self._added[bucket_of(key), it.micro_batch] += 1

    def _set_out(self, row: Row, meaning: _Meaning) -> None:
        """What is on its way from here on, and what it holds."""
        self._pending.update(i for i in (*row.writes, *row.adds) if self._keys[i] in meaning.arrives)
        if meaning.sums == "further":
            self._pending.update(row.adds[-1:])
        summed = {part for _, parts in row.collects for part in parts}  # are needed only here, their sum longer
        for i in (*row.writes, *row.adds):
            sent = meaning.holds.get(self._keys[i], ())
            leaves = meaning.sums == "one" and self._table.values[i].is_on_host
            held = {j for j in row.reads if (leaves or self._keys[j] in sent) and j not in summed}
            if held:
                self._held[i] = held
                self._sending.update(held)

    def _out_of_order(self, row: Row, meaning: _Meaning) -> Iterator[str]:
        """Slices write the past first to last, and come back last to first."""
        it = row.instruction
        for key in meaning.adds:
            if key[0] == "past" and it.op is Op.F:
                expected = self._passed[key, False]
                self._passed[key, False] += 1
            elif key[0] == "d_past":
                past: Key = ("past", *key[1:])
                expected = self._num_slices[past] - 1 - self._passed[key, True]
                self._passed[key, True] += 1
            else:
                continue
            if (it.slice or 0) != expected:
                yield f"comes where slice {expected} should"

    def _lost(self, row: Row, meaning: _Meaning) -> Iterator[str]:
        """Sums over ranks, losses and gradients that would be left out; parameters that may still be on their way."""
        for total, parts in row.collects:
            if total not in (*row.adds, *row.writes) or not set(parts) <= {*row.reads, *row.adds}:
                yield f"adds up {self._name(total)} without reading and writing it"
            self._collected.update(parts)
        if meaning.sums == "reduce":
            self._collected.update(i for i in row.reads if self._keys[i][0] == "d_parameters")
        added = {bucket_of(self._keys[i]) for i in row.adds if i in row.reads}
        if meaning.sums == "further" and str(row.instruction.block) not in added:
            yield "sums nothing over further ranks"
        if meaning.sums == "all":
            kinds = ("d_parameters", "reduced", *(["loss"] if row.instruction.op is Op.NORM else []))
            there = (i for i in self._written - self._freed - self._collected if self._keys[i][0] in kinds)
            wanted = (i for i in sorted(there) if bucket_of(self._keys[i]) not in meaning.without)
            yield from (f"does not read {self._name(i)}" for i in wanted if i not in row.reads)
        if meaning.sums == "one":
            own = str(row.instruction.block)
            there = self._written - self._freed - self._collected
            sums = [i for i in sorted(there) if self._keys[i][0] in ("d_parameters", "reduced")]
            wanted = (i for i in sums if bucket_of(self._keys[i]) == own)
            yield from (f"does not read {self._name(i)}" for i in wanted if i not in row.reads)
            yield from (f"reads {self._name(i)}, for which it has no use," for i in row.reads if self._strange(i, own))
        for i in row.frees:
            used = row.instruction.op is Op.STEP or i in self._collected or i in self._gone
            if self._keys[i][0] == "reduced" and not used:
                yield f"frees {self._name(i)} before it was added up"
        if self._parameters_arrive:
            kept = (i for i in (*row.reads, *row.adds) if self._keys[i][0] in ("parameters", f"{HOST}parameters"))
            first = (i for i in kept if i not in self._touched)
            yield from (f"uses {self._name(i)} without waiting for it" for i in first if i not in row.waits)

    def _incomplete(self, row: Row, meaning: _Meaning) -> Iterator[str]:
        """Sums that are used before everything was added to them."""
        for key in meaning.takes:
            if self._given[key] < self._to_give[key]:
                yield f"takes {_named(key)} before all of its {self._to_give[key]} parts are there"
        if not meaning.sums:
            return
        it = row.instruction
        wanted = {str(it.block)} if meaning.sums != "all" else {bucket for bucket, _ in self._to_add}
        per_micro_batch = meaning.sums == "reduce" and self._plan.reduces == "micro-batch"
        for bucket, micro_batch in self._to_add:
            matters = bucket in wanted and (not per_micro_batch or micro_batch == it.micro_batch)
            if matters and self._added[bucket, micro_batch] < self._to_add[bucket, micro_batch]:
                yield f"comes before micro-batch {micro_batch} has added all its gradients to bucket {bucket}"

    def _too_many(self, row: Row) -> Iterator[str]:
        gathered = (i for i in row.writes if self._keys[i][0] == self._brought)
        self._gathered.update(i for i in gathered if int(self._keys[i][1]) < self._rules.shape.num_blocks)
        num_blocks = len(self._gathered)
        if num_blocks > MAX_BLOCKS:
            yield f"has the parameters of {num_blocks} blocks {self._brought}, of which {MAX_BLOCKS} are allowed,"
        self._gathered.difference_update(row.frees)

    def _strange(self, i: int, bucket: str) -> bool:
        """Whether it is the sum of another bucket."""
        return self._keys[i][0] in ("d_parameters", "reduced") and bucket_of(self._keys[i]) != bucket

    def _name(self, i: int) -> str:
        return str(self._table.values[i])


def _named(key: Key) -> str:
    kind, what, micro_batch, slice_, half, _ = key
    place = "".join(f".{n}" for n in (micro_batch, slice_) if n is not None) + ("" if half is None else "ab"[half])
    return f"{kind}({what}){place}"
