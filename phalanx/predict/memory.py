"""The memory a rank needs for one step: the bytes of the values that live, by what holds them, and their peak.

Values come from the table of a compiled plan; what they are worth in bytes from the model's shape, whose expressions
are evaluated for each part of the batch. What libraries keep for themselves is not counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from phalanx.expressions import evaluate
from phalanx.plan.offload import PARTS_BESIDE
from phalanx.plan.plan import Plan
from phalanx.predict.costs import TOKENS, BucketCosts, Costs
from phalanx.predict.timeline import COMPUTE as COMPUTE_RESOURCE
from phalanx.predict.timeline import Event
from phalanx.program.compile import CompiledPlan
from phalanx.program.holders import buckets_of, chunks_of, fetched_of, hosted_of, is_tied
from phalanx.program.instructions import COMPUTE, SENDS, Instruction, Op
from phalanx.program.rules import Names
from phalanx.program.shape import ModelShape
from phalanx.program.values import HOST, RESIDENT, Row, Table, Value

_WORKING = {Op.F: 0, Op.A: 0, Op.B: 1, Op.W: 2, Op.BW: 3}  # places in `Step.working`
_OF_BUCKETS = frozenset((
    "fetched", "gathered", "d_parameters", "reduced", "staged", f"{HOST}parameters", f"{HOST}d_parameters",
    f"{HOST}state",
))  # fmt: skip
Dims = Mapping[str, int]
Part = tuple[int | None, int | None, int | None]  # micro-batch, slice, half

COMPONENTS = {
    "activation": "activations", "loss": "activations", "saved_b": "activations", "saved_bw": "activations",
    "saved_w": "activations", "past": "activations", "d_past": "gradients of activations",
    "gradient": "gradients of activations", "inputs": "inputs", "d_parameters": "gradients", "reduced": "gradients",
    "gathered": "gathered", "fetched": "fetched", "staged": "staging", "items": "inputs", "norm": "inputs",
    "norms": "inputs",
}  # fmt: skip


@dataclass
class Sizes:
    """How many bytes values have. dims: of a micro-batch, the largest. shape: its sizes are expressions over them.
    element_bytes: of an activation."""

    plan: Plan
    dims: Dims
    shape: ModelShape
    buckets: Sequence[BucketCosts]
    element_bytes: int = 4
    _known: dict[tuple[object, ...], int] = field(default_factory=dict[tuple[object, ...], int])

    @staticmethod
    def of(compiled: CompiledPlan, costs: Costs) -> Sizes:
        return Sizes(compiled.plan, costs.dims, compiled.shape, costs.buckets, costs.element_bytes)

    def part_dims(self, part: Part) -> dict[str, int]:
        """Of a half and slice of a micro-batch."""
        micro_batch, slice_, half = part
        dims = dict(self.dims)
        if half is not None and "batch" in dims:
            dims["batch"] = -(-dims["batch"] // self.plan.halves)
        if self.plan.slices and TOKENS in dims:
            dims["whole_tokens"] = dims[TOKENS]
            if slice_ is not None and micro_batch is not None:
                edges = self.plan.slice_bounds(micro_batch, dims[TOKENS])
                dims[TOKENS] = edges[slice_ + 1] - edges[slice_]
        return dims

    def __call__(self, value: Value) -> int:
        if value.kind in _OF_BUCKETS:
            return self._of_bucket(value)
        lengths = self.plan.slices and value.slice is not None
        key = (value.kind, value.what, value.half is None, (value.micro_batch, value.slice) if lengths else None)
        if key not in self._known:
            self._known[key] = self._evaluate(value)
        return self._known[key]

    def crossing(self, names: Names, stage: int, it: Instruction) -> int:
        """Bytes of what crosses before a stage for a part of the batch."""
        dims = self.part_dims((it.micro_batch, it.slice, it.half))
        sizes = self.shape.sizes
        return sum(self._number(sizes.get(name, "0"), dims) for name in names.crossing(stage, it.slice))

    def working(self, it: Instruction) -> int:
        """Bytes that a computation needs beside all values while it runs."""
        cut = self.plan.slices and it.slice is not None
        part = (it.half is None, (it.micro_batch, it.slice) if cut else None)
        key = (it.op, it.block, it.op_index, *part)
        if key not in self._known:
            assert it.block is not None
            texts = self.shape.ops_of(it.block)[it.op_index or 0].working
            dims = self.part_dims((it.micro_batch, it.slice, it.half))
            self._known[key] = self._number(texts[_WORKING[it.op]], dims) if texts else 0
        return self._known[key] + (self.beside if it.op is Op.F else 0)

    @cached_property
    def beside(self) -> int:
        """At most on the device of state that it updates beside a forward, with gradients and what is rounded."""
        if not self.plan.device_updates:
            return 0
        hosted = {bucket for place in range(self.plan.pp) for bucket in hosted_of(self.plan, self.shape, place)}
        return PARTS_BESIDE * max(map(self._part_beside, hosted), default=0)

    def _part_beside(self, bucket: int) -> int:
        costs, parts = self.buckets[bucket], self.plan.shards * chunks_of(self.plan, self.shape, bucket)
        moving = costs.master_bytes + costs.moment_bytes + costs.gradient_bytes + costs.trained_bytes
        return -(-moving // parts)

    def _evaluate(self, value: Value) -> int:
        dims = self.part_dims((value.micro_batch, value.slice, value.half))
        shape = self.shape
        match value.kind:
            case "inputs":
                size = shape.inputs
            case "activation" | "gradient":
                size = shape.sizes.get(value.what, value.size)
            case "saved_b" | "saved_bw" | "saved_w":
                block, op = map(int, value.what.split(":"))
                size = getattr(shape.ops_of(block)[op].bw, value.kind)
            case kind if kind.startswith(HOST):
                return self._evaluate(value._replace(kind=kind.removeprefix(HOST)))
            case "d_past":  # in float32 at least
                return self._number(value.size, dims) * max(1, 4 // self.element_bytes)
            case _:
                size = value.size
        return self._number(size, dims)

    @staticmethod
    def _number(size: str, dims: Dims) -> int:
        return int(size or 0) if size.isdigit() or not size else evaluate(size, dims)

    def single(self, value: Value) -> int:
        """The same of what nothing was added to yet: a gradient that no other rank has a part of is kept as it came, as
        wide as the weights. Those that a segment has by itself are of that kind."""
        bucket, _, op = value.what.partition("/")
        if value.kind != "d_parameters" or self.plan.adds_gradients:
            return self(value)
        is_alone = not self.shape.cells(int(bucket)) and not is_tied(self.plan, self.shape, int(bucket))
        if not op and not is_alone:
            return self(value)
        costs = self.buckets[int(bucket)]
        return min(self(value), self(value) * costs.trained_bytes // max(1, costs.gradient_bytes))

    def _of_bucket(self, value: Value) -> int:
        bucket, _, op = value.what.partition("/")
        if value.kind in ("staged", f"{HOST}state"):
            bucket, _, _ = bucket.partition(":")
            parts = self.plan.shards * chunks_of(self.plan, self.shape, int(bucket))
            return -(-self._of_state(int(bucket), is_staged=value.kind == "staged") // parts)
        costs = self.buckets[int(bucket)]
        if value.kind in ("fetched", f"{HOST}parameters"):
            return -(-costs.weight_bytes // (self.plan.shards if self.plan.zero == 3 else 1))
        if value.kind == "gathered":
            return costs.weight_bytes
        if value.kind in ("reduced", f"{HOST}d_parameters") and self.plan.zero:
            return -(-costs.gradient_bytes // self.plan.shards)
        if not op:
            return costs.gradient_bytes
        chain = self.shape.ops_of(int(bucket))
        users = [i for i, own in enumerate(chain) if own.kind == "segment" and own.bw.trains]
        return costs.gradient_bytes // max(1, len(users))

    def _of_state(self, bucket: int, *, is_staged: bool) -> int:
        """Of a bucket whose parameters lie on the host these come with its state, unless masters do, and its gradients;
        what goes back are both."""
        costs = self.buckets[bucket]
        beside = 0
        if bucket in self._fetched:
            with_masters = costs.gradient_bytes if is_staged else costs.weight_bytes
            without = costs.weight_bytes + (costs.gradient_bytes if is_staged else 0)
            beside = with_masters if costs.master_bytes else without
        return costs.master_bytes + costs.moment_bytes + beside

    @cached_property
    def _fetched(self) -> frozenset[int]:
        """The buckets whose parameters lie on the host."""
        places = range(self.plan.pp) if self.plan.hosts_parameters else ()
        return frozenset(bucket for place in places for bucket in fetched_of(self.plan, self.shape, place))


Size = Callable[[Value], int]


def _where(on_host: bool, size: Size) -> Size:
    return lambda value: size(value) if value.is_on_host == on_host else 0


def peak_in_order(
    table: Table, size: Size, single: Size, working: Callable[[Instruction], int], *, on_host: bool = False
) -> dict[str, int]:
    """Bytes by component when values that exist and what a computation needs beside them are most, as rows follow each
    other. single: of a sum to which nothing was added yet."""
    held: Counter[str] = Counter()
    peak, most = dict[str, int](), -1
    in_order = changes_in_order(table, _where(on_host, size), _where(on_host, single))
    for row, changes in zip(table.rows, in_order, strict=True):
        for when in (_BEFORE, _AT_ITS_END, _AFTER):
            for own, component, change in changes:
                held[component] += change if own == when else 0
            held["working"] = working(row.instruction) if when == _BEFORE else 0
            if held.total() > most:
                peak, most = dict(held), held.total()
    return peak


_BEFORE, _AT_ITS_END, _AFTER = range(3)  # a row runs


def changes_in_order(table: Table, size: Size, single: Size) -> Iterator[list[tuple[int, str, int]]]:
    """Of each row when something changes, of which component, and bytes more or less. What a row computes of the
    gradients of parameters it needs while it runs, and only then adds to their sums."""
    users: dict[int, int] = {}
    sizes: dict[int, int] = {}
    for row in table.rows:
        found: list[tuple[int, str, int]] = []
        for i in row.writes:
            value = table.values[i]
            if not users.get(value.memory):
                sizes[value.memory] = single(value)
                when = _AT_ITS_END if value.kind == "d_parameters" else _BEFORE
                found.append((when, component_of(value), sizes[value.memory]))
            users[value.memory] = users.get(value.memory, 0) + 1
        for i in row.adds:
            value = table.values[i]
            if more := size(value) - sizes.get(value.memory, size(value)):
                sizes[value.memory] += more
                found.append((_AT_ITS_END, component_of(value), more))
        dropped = set(row.dropped)
        for i in row.frees:
            value = table.values[i]
            users[value.memory] -= 1
            if not users[value.memory]:
                when = _BEFORE if i in dropped else _AFTER
                found.append((when, component_of(table.values[value.memory]), -sizes[value.memory]))
        yield found


def component_of(value: Value) -> str:
    return COMPONENTS.get(value.kind.removeprefix(HOST), "")


def resident_bytes(compiled: CompiledPlan, costs: Costs, rank: int) -> dict[str, int]:
    """Held during the whole step. ZeRO shards the optimizer's state, with 3 the weights."""
    plan, shape = compiled.plan, compiled.shape

    def share(size: int, from_stage: int) -> int:
        return -(-size // plan.shards) if plan.zero >= from_stage else size

    held, fetched = (of(plan, shape, compiled.pp_index(rank)) for of in (buckets_of, fetched_of))
    hosted = hosted_of(plan, shape, compiled.pp_index(rank))
    trained = [bucket for bucket in held if shape.trained[bucket] and bucket not in hosted]
    return {
        "parameters": share(sum(costs.buckets[bucket].weight_bytes for bucket in held if bucket not in fetched), 3),
        "masters": share(sum(costs.buckets[bucket].master_bytes for bucket in trained), 1),
        "moments": share(sum(costs.buckets[bucket].moment_bytes for bucket in trained), 1),
    }


def peak_memory(compiled: CompiledPlan, costs: Costs, rank: int, events: Sequence[Event]) -> dict[str, int]:
    """What a rank holds at the moment it holds most; `events` are its own, in the order of its program."""
    held = resident_bytes(compiled, costs, rank) | dict.fromkeys(("gradients", "activations"), 0)
    peak, most = dict(held), sum(held.values())
    now = most
    # At one moment, what is released makes room for what is taken.
    for _, size, part in sorted(_changes(compiled, costs, rank, events)):
        held[part] = held.get(part, 0) + size
        now += size
        if now > most:
            peak, most = dict(held), now
    return peak


def _changes(
    compiled: CompiledPlan, costs: Costs, rank: int, events: Sequence[Event]
) -> Iterator[tuple[float, int, str]]:  # fmt: skip
    """When, bytes more (or less), of what. A value is there from when its instruction is issued, until the one that
    frees it has ended; what is sent, until it has been."""
    table, size = compiled.tables[compiled.pp_index(rank)], Sizes.of(compiled, costs)
    users: dict[int, int] = {}
    sizes: dict[int, int] = {}
    now = 0.0  # when what comes next is issued
    arrives: dict[int, float] = {}
    for row, event in zip(table.rows, events, strict=True):
        computes = event.resource == COMPUTE_RESOURCE
        now = max([now, *(arrives.pop(i) for i in row.waits if i in arrives)])
        if not computes:
            arrives.update(dict.fromkeys((*row.writes, *row.adds), event.end))
            now = event.end if row.instruction.op is Op.NORM else now
        issued = event.start if computes else now
        ended = event.end if computes or row.instruction.op in SENDS else now
        summed = issued if size.plan.adds_gradients else ended  # else they are the sum
        for i in row.writes:
            value = table.values[i]
            if not users.get(value.memory) and value.kind not in RESIDENT and not value.is_on_host:
                sizes[value.memory] = size.single(value)
                when = summed if value.kind == "d_parameters" else issued
                yield when, sizes[value.memory], COMPONENTS[value.kind]
            users[value.memory] = users.get(value.memory, 0) + 1
        for i in row.adds:
            value = table.values[i]
            if more := size(value) - sizes.get(value.memory, size(value)):
                sizes[value.memory] += more
                yield summed, more, COMPONENTS[value.kind]
        yield from _working(table, size, row, event)
        dropped = set(row.dropped)
        for i in row.frees:
            value = table.values[i]
            users[value.memory] = users.get(value.memory, 1) - 1
            if not users[value.memory] and value.memory in sizes:
                yield (
                    issued if i in dropped else ended,
                    -sizes[value.memory],
                    COMPONENTS[table.values[value.memory].kind],
                )
        now = event.end if computes else now


def _working(table: Table, size: Sizes, row: Row, event: Event) -> Iterator[tuple[float, int, str]]:
    """While a computation runs; what it adds to a sum is there by itself before."""
    if row.instruction.op in COMPUTE and row.instruction.block is not None:
        added = sum(size(value) for i in row.adds if (value := table.values[i]).kind == "gradient")
        needed = size.working(row.instruction) + added
        if needed:
            yield event.start, needed, "working"
            yield event.end, -needed, "working"
