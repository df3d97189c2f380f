"""From a program bound to its values to calls: which function each instruction is, and where its arguments lie.

Done once for each program and shape of its micro-batches. Nothing is decided here: a call computes or sends what its
row of the table says, on values that the engine keeps by their places.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from phalanx.comm.links import Channel, Direction, Group
from phalanx.comm.pending import Pending
from phalanx.engine.compute import Compute
from phalanx.engine.gradients import BucketGradients, Reduced, Sum, together
from phalanx.engine.graph import ExecutionGraph
from phalanx.engine.host_copies import HostCopies, HostValue
from phalanx.engine.inputs import Inputs
from phalanx.engine.redistribute import Arriving, Mover
from phalanx.engine.reductions import GlobalReductions, Place, StepRun
from phalanx.engine.trace import Traced, Tracer
from phalanx.model.graph.blocks import Block
from phalanx.model.interpret import tensor_ports
from phalanx.model.segment.segments import Call, Segment, Source, WeightCall
from phalanx.model.shard.sharded import Redistribution
from phalanx.params.hosted import HostedOptimizer, Left
from phalanx.params.parameters import Parameters
from phalanx.plan.plan import Plan
from phalanx.program.bind import bind
from phalanx.program.instructions import Instruction, Op, Program
from phalanx.program.rules import Names
from phalanx.program.shape import ModelShape, Partition
from phalanx.program.values import HOST, Row, Table, Value

Values = list[Any]
Run = Callable[[Values, StepRun], None]
StandIn = Callable[[Op, int, Call], Callable[..., Any]]
"""Gives something to call instead of a segment's function, by what is done, the segment's number, and that function;
weight gradients are then not added up."""
Argument = tuple[int, Any]  # the place of a value and, where that holds several, which of them
_EXTRAS = ("parameters", "buffers", "constants", "zeros", "d_loss")  # behind the values of the table
_PARAMETERS = ("parameters", "gathered")


class LinkedRow(NamedTuple):
    """waits: values that are on their way, each with how to wait for it. drops: what is freed before it runs. releases:
    what is done with a value besides dropping it when it is freed."""

    instruction: Instruction
    waits: tuple[tuple[int, Callable[[Any], Any]], ...]
    drops: tuple[int, ...]
    run: Run
    frees: tuple[int, ...]
    releases: tuple[tuple[int, Callable[[Any], None]], ...]


class ComputeCall(NamedTuple):
    """A function that some instruction calls, with what it is called with: for running it beforehand."""

    instruction: Instruction
    number: int
    segment: Segment
    call: Call
    inputs: Inputs
    keys: tuple[Any, ...]  # per argument that comes from the inputs; else None


@dataclass
class Linked:
    table: Table
    rows: list[LinkedRow] = field(default_factory=list[LinkedRow])
    calls: list[ComputeCall] = field(default_factory=list[ComputeCall])

    def fresh(self, extras: Mapping[str, Any]) -> Values:
        """Places for all values, of which nothing is there yet."""
        return [*[None] * len(self.table.values), *(extras[name] for name in _EXTRAS)]


class Sends:
    """Messages that leave: their tensors live until they have."""

    def __init__(self) -> None:
        self._leaving: deque[Pending] = deque()

    def add(self, pending: Pending) -> None:
        self._leaving.append(pending)
        while self._leaving and self._leaving[0].done():
            self._leaving.popleft().wait()

    def settle(self) -> None:
        """Waits until everything sent has left, so that its memory may be used for something else."""
        while self._leaving:
            self._leaving.popleft().wait("messages to leave")


@dataclass(frozen=True)
class Parts:
    """What carries out a rank's instructions. zero: the ranks that together hold all shards of its parameters.
    movers: by the ranks that take part. channel: what leads from one rank to another, for activations ("f") or for
    gradients ("b"). gradients: of the buckets whose sums are not this rank's alone. Without totals there is no
    backward."""

    plan: Plan
    shape: ModelShape
    rank: int
    pp_index: int
    graph: ExecutionGraph
    compute: Compute
    tracer: Tracer
    parameters: Parameters
    zero: Group
    movers: Mapping[Partition, Mover]
    channel: Callable[[int, int, Direction], Channel]
    gradients: Mapping[int, BucketGradients]
    totals: GlobalReductions | None
    home: Mapping[str, int]  # the bucket of each parameter
    copies: HostCopies
    hosted: HostedOptimizer | None = None
    stand_in: StandIn | None = None
    sends: Sends = field(default_factory=Sends)


def link(parts: Parts, program: Program, inputs: Mapping[Place, Inputs]) -> Linked:
    """For micro-batches that look like these."""
    return _Linker(parts, program, inputs).run()


class _Zeros:
    """A gradient that nobody gave."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __getitem__(self, look: tuple[tuple[int, ...], torch.dtype]) -> Tensor:
        return torch.zeros(look[0], dtype=look[1], device=self._device)


def extras_of(parts: Parts) -> dict[str, Any]:
    compute = parts.compute
    return {
        "parameters": parts.parameters.values, "buffers": compute.buffers, "constants": compute.constants,
        "zeros": _Zeros(compute.device), "d_loss": None,
    }  # fmt: skip


class _Linker:
    def __init__(self, parts: Parts, program: Program, inputs: Mapping[Place, Inputs]) -> None:
        self._parts, self._inputs = parts, inputs
        first = parts.tracer(next(iter(inputs.values())))
        self._shape = first.shape(parts.shape)
        self._names = Names(parts.plan, self._shape)
        self._table = bind(parts.plan, self._shape, program, parts.pp_index)
        self._extra = {name: len(self._table.values) + i for i, name in enumerate(_EXTRAS)}
        self._linked = Linked(self._table)
        self._row: Row = self._table.rows[0]
        self._makers: dict[Op, Callable[[Instruction], Run]] = {
            Op.INPUT: self._input, Op.F: self._forward, Op.A: self._forward, Op.CF: self._redistribute,
            Op.CA: self._redistribute, Op.LF: self._redistribute, Op.LA: self._redistribute,
            Op.CB: self._redistribute_back,
            Op.LB: self._redistribute_back, Op.B: self._backward, Op.BW: self._backward, Op.W: self._weight,
            Op.SEND_F: self._send_forward, Op.RECV_F: self._receive_forward, Op.SEND_B: self._send_backward,
            Op.RECV_B: self._receive_backward, Op.GATHER: self._gather, Op.REDUCE: self._reduce, Op.SUM: self._sum,
            Op.TIE: self._sum, Op.COUNT: self._count, Op.NORM: self._norm, Op.STEP: self._optimize,
            Op.SHARE: self._share, Op.OUT: self._move_out, Op.IN: self._move_in,
        }  # fmt: skip

    def run(self) -> Linked:
        for row in self._table.rows:
            self._row, it = row, row.instruction
            made = self._collected(self._makers[it.op](it))
            waits = tuple((i, self._wait(i)) for i in self._row.waits)
            releases = [(i, release) for i in self._row.frees if (release := self._release(i)) is not None]
            drops = tuple(i for i in self._row.dropped if self._release(i) is None)
            frees = tuple(i for i in self._row.frees if i not in drops)
            self._linked.rows.append(LinkedRow(it, waits, drops, made, frees, tuple(releases)))
        return self._linked

    # Computation.

    def _input(self, it: Instruction) -> Run:
        (place,), key = self._row.writes, (it.micro_batch or 0, it.half or 0)

        def run(values: Values, step: StepRun) -> None:
            values[place] = step.inputs.pop(key)

        return run

    def _forward(self, it: Instruction) -> Run:
        number, block, segment = self._segment(it)
        outputs = [(i, self._written(it, name)) for i, name in enumerate(block.outputs)]
        kept = [(i, place) for i, place in outputs if place is not None and place not in self._row.frees]
        saved_b, saved_bw = self._left("saved_b"), self._left("saved_bw")
        saves = saved_b is not None or saved_bw is not None
        if it.op is Op.A and not kept:
            call, count = segment.again, 0
        else:
            call, count = segment.forward if saves else segment.run, len(block.outputs)
        first, second = count + len(segment.saved_b), count + len(segment.saved_b) + len(segment.saved_bw)
        function, arguments = self._function(it, number, call), self._arguments(it, number, block, segment, call)
        past, inputs = self._left("past"), self._place("inputs")
        degree, names = self._parts.graph.part(it).degree, block.names("past")

        def run(values: Values, step: StepRun) -> None:
            results = function(*[values[i] if k is None else values[i][k] for i, k in arguments])
            for i, place in kept:
                values[place] = results[i]
            if past is not None:
                values[past] = _HeldPast(values[inputs], degree, names)
            if saved_b is not None:
                values[saved_b] = results[count:first]
            if saved_bw is not None:
                values[saved_bw] = results[first:second]

        return run

    def _backward(self, it: Instruction) -> Run:
        number, block, segment = self._segment(it)
        if not any(segment.joint.differentiable):
            return _nothing
        if it.op is Op.BW and segment.trains:
            return self._fused(it, number, block, segment)
        call = segment.backward
        function, arguments = self._function(it, number, call), self._arguments(it, number, block, segment, call)
        give, count, saved_w = self._giving(it, block, segment), len(segment.gives), self._left("saved_w")
        d_loss = self._d_loss(block, segment)

        def run(values: Values, step: StepRun) -> None:
            d_loss(values)
            results = function(*[values[i] if k is None else values[i][k] for i, k in arguments])
            give(values, results)
            if saved_w is not None:
                values[saved_w] = results[count:]

        return run

    def _fused(self, it: Instruction, number: int, block: Block, segment: Segment) -> Run:
        call = segment.backward_weight
        weigh, give = self._weighing(it, number, block, segment, call), self._giving(it, block, segment)
        d_loss = self._d_loss(block, segment)

        def run(values: Values, step: StepRun) -> None:
            d_loss(values)
            give(values, weigh(values))

        return run

    def _weight(self, it: Instruction) -> Run:
        number, block, segment = self._segment(it)
        if not segment.trains or not any(segment.joint.differentiable):
            return _nothing
        weigh = self._weighing(it, number, block, segment, segment.weight)

        def run(values: Values, step: StepRun) -> None:
            weigh(values)

        return run

    def _weighing(
        self, it: Instruction, number: int, block: Block, segment: Segment, call: WeightCall
    ) -> Callable[[Values], Sequence[Tensor]]:
        """Calls a function that gives weight gradients and adds them up; returns all its results."""
        function, taken, gradients = self._function(it, number, call), call.num_taken, call.gradients
        arguments = self._arguments(it, number, block, segment, call)
        names, add, stands_in = block.names("parameter"), self._adding(it, block), self._parts.stand_in is not None

        def weigh(values: Values) -> Sequence[Tensor]:
            given = [values[i] if k is None else values[i][k] for i, k in arguments]
            results = function(*given[:taken])
            if not stands_in:
                add(values, together(names, gradients(given, results)))
            return results

        return weigh

    def _adding(self, it: Instruction, block: Block) -> Callable[[Values, dict[str, Any]], None]:
        """Adds gradients to the sums of their buckets."""
        targets = {v.what: i for i, v in self._valued((*self._row.writes, *self._row.adds), "d_parameters")}
        home, op_index = self._parts.home, it.op_index or 0
        by_name: dict[str, tuple[int, Callable[[], Any]]] = {}
        for name in dict.fromkeys(block.names("parameter")):
            bucket = home[name]
            place = targets.get(str(bucket), targets.get(f"{bucket}/{op_index}"))
            if place is not None:
                flat = self._parts.gradients.get(bucket)
                by_name[name] = place, flat.open if flat is not None else Sum

        def add(values: Values, found: dict[str, Any]) -> None:
            split: dict[int, dict[str, Any]] = {}
            for name, gradient in found.items():
                split.setdefault(by_name[name][0], {})[name] = gradient
            for place, own in split.items():
                if values[place] is None:
                    values[place] = by_name[next(iter(own))][1]()
                values[place].add(own)

        return add

    def _giving(self, it: Instruction, block: Block, segment: Segment) -> Callable[[Values, Sequence[Tensor]], None]:
        """Adds the gradients of inputs, the first of a function's results, to their sums."""
        ports = tensor_ports(block)
        targets = {v.what: i for i, v in self._valued((*self._row.adds, *self._row.writes), "gradient")}
        earlier = {v.what: i for i, v in self._valued(self._row.reads, "gradient") if i != targets.get(v.what)}
        moves: list[tuple[int, int]] = []
        for port in segment.gives:
            name = self._names.gradient.get(ports[port].name, ports[port].name)
            moves.append((targets[name], earlier.pop(name, targets[name])))

        def give(values: Values, results: Sequence[Tensor]) -> None:
            for (place, before), gradient in zip(moves, results):
                there = values[before]
                values[place] = gradient if there is None else there + gradient

        return give

    def _d_loss(self, block: Block, segment: Segment) -> Callable[[Values], None]:
        """Where a segment puts the loss out, its gradient is one over the number of items."""
        outputs = zip(block.outputs, segment.joint.outputs, strict=True)
        losses = [node.meta["val"].dtype for name, node in outputs if self._names.is_d_loss(name)]
        return self._scale(losses[0]) if losses else _unscaled

    def _scale(self, dtype: torch.dtype) -> Callable[[Values], None]:
        items, place, totals = self._place("items"), self._extra["d_loss"], self._parts.totals
        assert totals is not None

        def scale(values: Values) -> None:
            values[place] = totals.scale(values[items]).to(dtype)

        return scale

    def _arguments(
        self, it: Instruction, number: int, block: Block, segment: Segment, call: Call
    ) -> list[Argument]:  # fmt: skip
        found = [self._argument(it, block, segment, source) for source in call.arguments]
        inputs = self._inputs[it.micro_batch or 0, it.half or 0]
        keys = tuple(key if isinstance(key, tuple) and len(key) == 4 else None for _, key in found)
        self._linked.calls.append(ComputeCall(it, number, segment, call, inputs, keys))
        return found

    def _function(self, it: Instruction, number: int, call: Call) -> Callable[..., Any]:
        return call.function if self._parts.stand_in is None else self._parts.stand_in(it.op, number, call)

    def _argument(self, it: Instruction, block: Block, segment: Segment, source: Source) -> Argument:
        kind, number = source
        if kind == "port":
            port = tensor_ports(block)[number]
            if port.kind == "activation":
                return self._read(it, port.name), None
            if port.kind in ("parameter", "buffer", "constant"):
                return self._extra[f"{port.kind}s"], port.name
            degree = self._parts.graph.part(it).degree
            return self._place("inputs"), (it.slice or 0, degree, port.kind, port.name)
        if kind == "output":
            return self._read(it, block.outputs[number]), None
        if kind != "gradient":
            return self._place(kind), number
        name = block.outputs[number]
        if self._names.is_d_loss(name):
            return self._extra["d_loss"], None
        taken = self._taken().get(self._names.gradient.get(name, name))
        like = segment.like(source)
        return (self._extra["zeros"], (tuple(like.shape), like.dtype)) if taken is None else (taken, None)

    # Between ranks.

    def _redistribute(self, it: Instruction) -> Run:
        redistribution, dims = self._moved(it)
        (place,), move = self._row.writes, self._parts.movers[redistribution.cells].forward(redistribution, dims)
        source = self._read(it, redistribution.source)

        def run(values: Values, step: StepRun) -> None:
            values[place] = move(values[source])

        return run

    def _redistribute_back(self, it: Instruction) -> Run:
        if not (self._row.writes or self._row.adds):
            return _nothing  # no gradient came, on any rank
        redistribution, dims = self._moved(it)
        move = self._parts.movers[redistribution.cells].backward(redistribution, dims)
        name = self._names.gradient.get(redistribution.target, redistribution.target)
        is_d_loss = self._names.is_d_loss(redistribution.target)
        gradient = self._extra["d_loss"] if is_d_loss else self._taken()[name]
        d_loss = self._scale(self._traced(it).outlines[redistribution.target].dtype) if is_d_loss else _unscaled
        given = self._names.gradient.get(redistribution.source, redistribution.source)
        found = self._valued((*self._row.adds, *self._row.writes), "gradient")
        place = [i for i, v in found if v.what == given][-1]
        before = [i for i, v in self._valued(self._row.reads, "gradient") if v.what == given and i != gradient]
        earlier = before[0] if before else place

        def run(values: Values, step: StepRun) -> None:
            d_loss(values)
            moved, there = move(values[gradient]), values[earlier]
            values[place] = moved if there is None else there + moved

        return run

    def _moved(self, it: Instruction) -> tuple[Redistribution, Mapping[str, int]]:
        part = self._parts.graph.part(it)
        assert part.redistribution is not None
        return part.redistribution, self._inputs[it.micro_batch or 0, it.half or 0].dims(it.slice or 0, part.degree)

    def _send_forward(self, it: Instruction) -> Run:
        stage, peer = _ends(it)
        channel, sends = self._parts.channel(self._parts.rank, peer, "f"), self._parts.sends
        places = [self._read(it, name) for name in self._names.crossing(stage + 1, it.slice)]

        def run(values: Values, step: StepRun) -> None:
            for place in places:
                sends.add(channel.send(values[place]))

        return run

    def _send_backward(self, it: Instruction) -> Run:
        """Zero for one that the loss does not depend on."""
        stage, peer = _ends(it)
        channel, sends, traced = self._parts.channel(self._parts.rank, peer, "b"), self._parts.sends, self._traced(it)
        gradients = self._taken()
        wanted: list[Argument] = []
        for name in self._names.returning(stage, it.slice):
            place, look = gradients.get(self._names.gradient.get(name, name)), traced.outlines[name]
            wanted.append((self._extra["zeros"], (look.shape, look.dtype)) if place is None else (place, None))

        def run(values: Values, step: StepRun) -> None:
            for i, key in wanted:
                sends.add(channel.send((values[i] if key is None else values[i][key]).contiguous()))

        return run

    def _receive_forward(self, it: Instruction) -> Run:
        stage, _ = _ends(it)
        return self._receive(it, self._names.crossing(stage, it.slice), "f")

    def _receive_backward(self, it: Instruction) -> Run:
        stage, _ = _ends(it)
        return self._receive(it, self._names.returning(stage + 1, it.slice), "b")

    def _receive(self, it: Instruction, names: Sequence[str], direction: Direction) -> Run:
        """Makes room for what is to come and starts receiving it."""
        _, peer = _ends(it)
        channel, device = self._parts.channel(peer, self._parts.rank, direction), self._parts.compute.device
        looks = [self._traced(it).outlines[name] for name in names]
        places = list(zip(self._row.writes, looks, strict=True))

        def run(values: Values, step: StepRun) -> None:
            for place, look in places:
                buffer = look.empty(device)
                values[place] = Arriving(channel.recv(buffer), lambda buffer=buffer: buffer)

        return run

    # Between device and host.

    def _move_out(self, it: Instruction) -> Run:
        if it.stage is None:
            return self._gradients_out(it) if it.op_index is None else self._state_out(it)
        moves, copies = list(zip(self._row.reads, self._row.writes, strict=True)), self._parts.copies

        def run(values: Values, step: StepRun) -> None:
            for source, target in moves:
                values[target] = copies.out(values[source])

        return run

    def _gradients_out(self, it: Instruction) -> Run:
        totals, hosted, bucket = self._parts.totals, self._parts.hosted, _block(it)
        sums = [i for i, v in self._valued(self._row.reads) if v.kind in ("d_parameters", "reduced")]
        ((there, _),) = self._valued(self._row.writes, f"{HOST}d_parameters")
        ((norms, _),) = self._valued(self._row.writes, "norms")
        parts = {i for _, own in self._row.collects for i in own}
        assert totals is not None and hosted is not None, f"bucket {bucket} is not kept on the host"

        def run(values: Values, step: StepRun) -> None:
            gradients: dict[str, Tensor] = {}
            for i in sums:
                gradients |= {} if values[i] is None or i in parts else values[i].pieces()
            values[norms] = totals.norms(gradients)
            left = hosted.leave(gradients)
            step.gradients |= left.pieces
            values[there] = Arriving(left.copying, lambda: left)

        return run

    def _state_out(self, it: Instruction) -> Run:
        hosted, part, (place,) = self._parts.hosted, _part(it), self._row.adds
        assert hosted is not None

        def run(values: Values, step: StepRun) -> None:
            values[place] = Arriving(hosted.store(part), lambda: None)

        return run

    def _state_in(self, it: Instruction) -> Run:
        hosted, part, (place,) = self._parts.hosted, _part(it), self._row.writes
        assert hosted is not None

        def run(values: Values, step: StepRun) -> None:
            values[place] = Arriving(hosted.fetch(part), lambda: True)

        return run

    def _move_in(self, it: Instruction) -> Run:
        if it.stage is None:
            return self._state_in(it)
        moves, copies = list(zip(self._row.reads, self._row.writes, strict=True)), self._parts.copies

        def run(values: Values, step: StepRun) -> None:
            for source, target in moves:
                values[target] = copies.back(values[source])

        return run

    # Parameters.

    def _gather(self, it: Instruction) -> Run:
        bucket, parameters, zero = _block(it), self._parts.parameters, self._parts.zero
        return lambda values, step: parameters.gather(bucket, zero)

    def _share(self, it: Instruction) -> Run:
        bucket, parameters, zero = _block(it), self._parts.parameters, self._parts.zero
        return lambda values, step: parameters.share(bucket, zero)

    def _reduce(self, it: Instruction) -> Run:
        bucket, place = self._parts.gradients[_block(it)], self._row.writes[-1]
        added = next(i for i, v in self._valued(self._row.reads, "d_parameters"))

        def run(values: Values, step: StepRun) -> None:
            values[place] = bucket.reduce(values[added] or bucket.open())

        return run

    def _sum(self, it: Instruction) -> Run:
        bucket = self._parts.gradients[_block(it)]
        group, place = bucket.how.replicas if it.op is Op.SUM else bucket.how.tie, self._row.adds[-1]

        def run(values: Values, step: StepRun) -> None:
            there = values[place]
            reduced = there if isinstance(there, Reduced) else bucket.whole(there or bucket.open())
            values[place] = bucket.sum(reduced, group)

        return run

    def _count(self, it: Instruction) -> Run:
        totals, (place,), alone = self._parts.totals, self._row.writes, self._parts.plan.dp == 1
        assert totals is not None

        def run(values: Values, step: StepRun) -> None:
            counted = totals.count(step)
            values[place] = counted.wait("the number of items") if alone else counted

        return run

    def _norm(self, it: Instruction) -> Run:
        totals, (place,) = self._parts.totals, self._row.writes
        losses = [i for i, _ in self._valued(self._row.reads, "loss")]
        sums = [i for i, v in self._valued(self._row.reads) if v.kind in ("d_parameters", "reduced")]
        items, left = self._place("items"), [i for i, _ in self._valued(self._row.reads, "norms")]
        assert totals is not None

        def run(values: Values, step: StepRun) -> None:
            gradients: dict[str, Tensor] = {}
            for i in sums:
                gradients |= {} if values[i] is None else values[i].pieces()
            norms = {name: norm for i in left for name, norm in values[i].items()}
            values[place] = totals.norm(step, values[items], [values[i] for i in losses], gradients, norms)

        return run

    def _optimize_part(self, it: Instruction) -> Run:
        totals, hosted, part = self._parts.totals, self._parts.hosted, _part(it)
        assert totals is not None and hosted is not None
        if not self._parts.plan.steps_on_host:
            return lambda values, step: hosted.step(part, step.gradients, totals.given(step))
        ((place, _),) = self._valued(self._row.reads, f"{HOST}d_parameters")
        bucket, is_last = self._parts.parameters.bucket(_block(it)), place in self._row.frees

        def run(values: Values, step: StepRun) -> None:
            left = values[place]
            assert isinstance(left, Left)
            updated = hosted.step_behind(part, left, totals.given_on_host(step), is_last)
            bucket.update(lambda: updated.result().wait("updated parameters"))

        return run

    def _optimize(self, it: Instruction) -> Run:
        if it.block is not None:
            return self._optimize_part(it)
        totals, sends = self._parts.totals, self._parts.sends
        assert totals is not None

        def run(values: Values, step: StepRun) -> None:
            totals.step(step)
            sends.settle()

        return run

    # Places.

    def _segment(self, it: Instruction) -> tuple[int, Block, Segment]:
        part = self._parts.graph.part(it)
        assert part.segment is not None
        return part.segment, self._parts.graph.segment(part), self._traced(it).segments[part.segment]

    def _traced(self, it: Instruction) -> Traced:
        return self._parts.tracer(self._inputs[it.micro_batch or 0, it.half or 0], it.slice or 0)

    def _valued(self, ids: Sequence[int], kind: str = "") -> list[tuple[int, Value]]:
        values = self._table.values
        return [(i, values[i]) for i in ids if not kind or values[i].kind == kind]

    def _place(self, kind: str) -> int:
        (place,) = (i for i, _ in self._valued(self._row.reads, kind))
        return place

    def _taken(self) -> dict[str, int]:
        """The gradients that the row takes: what is collected for them is read before."""
        return {v.what: i for i, v in self._valued(self._row.reads, "gradient")}

    def _left(self, kind: str) -> int | None:
        return next((i for i, _ in self._valued(self._row.writes, kind)), None)

    def _read(self, it: Instruction, name: str) -> int:
        if self._names.is_loss(name):
            return self._place("loss")
        name = self._names.activation.get(name, name)
        return next(i for i, v in self._valued(self._row.reads, "activation") if v.what == name)

    def _written(self, it: Instruction, name: str) -> int | None:
        if self._names.is_loss(name):
            return self._left("loss")
        return next((i for i, v in self._valued(self._row.writes, "activation") if v.what == name), None)

    def _collected(self, run: Run) -> Run:
        """Adds up first what has arrived for sums."""
        collects = self._row.collects
        if not collects:
            return run

        def collect(values: Values, step: StepRun) -> None:
            for place, parts in collects:
                for part in parts:
                    there, new = values[place], values[part]
                    if isinstance(new, Reduced):
                        there.add(new)
                    else:
                        values[place] = new if there is None else there + new
            run(values, step)

        return collect

    def _wait(self, place: int) -> Callable[[Any], Any]:
        value, parameters = self._table.values[place], self._parts.parameters
        if value.kind in _PARAMETERS:
            buckets = (int(value.what),)

            def ready(there: Any) -> None:
                parameters.ready(buckets)

            return ready
        what = str(value)
        return lambda there: there.wait(what) if isinstance(there, Arriving) else there

    def _release(self, place: int) -> Callable[[Any], None] | None:
        value = self._table.values[place]
        if value.kind == "gathered":
            bucket, parameters = int(value.what), self._parts.parameters
            return lambda there: parameters.free(bucket)
        if value.kind in ("past", "reduced", "d_parameters") or value.is_on_host:
            return lambda there: there.release() if isinstance(there, Reduced | _HeldPast | HostValue) else None
        return None


@dataclass(frozen=True)
class _HeldPast:
    """Keys and values of a micro-batch's slices, which lie with its inputs."""

    inputs: Inputs
    degree: int
    names: tuple[str, ...]

    def release(self) -> None:
        self.inputs.clear_past(self.degree, self.names)


def _part(it: Instruction) -> tuple[int, int]:
    """Of a bucket's state."""
    assert it.op_index is not None
    return _block(it), it.op_index


def _unscaled(values: Values) -> None:
    """Of what does not put the loss out."""


def _nothing(values: Values, step: StepRun) -> None:
    """Where nothing is trained there is nothing to do."""


def _ends(it: Instruction) -> tuple[int, int]:
    assert it.stage is not None and it.peer is not None
    return it.stage, it.peer


def _block(it: Instruction) -> int:
    assert it.block is not None
    return it.block
