"""Calls of segments: forward, backward and weight gradients, and where their arguments lie."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import groupby
from operator import itemgetter
from typing import Any

from torch import Tensor

from phalanx.engine.gradients import ExactSum, Sum, together
from phalanx.engine.linked import (
    Argument,
    ComputeCall,
    HeldPast,
    Run,
    Values,
)
from phalanx.engine.reductions import StepRun
from phalanx.engine.rows.maker import Linking, Maker, nothing, unscaled
from phalanx.model.graph.blocks import Block
from phalanx.model.interpret import tensor_ports
from phalanx.model.segment.segments import Call, Segment, Source, WeightCall
from phalanx.program.instructions import Instruction, Op


class Computations(Maker):
    """What a rank computes with the model."""

    def __init__(self, linking: Linking) -> None:
        super().__init__(linking)
        self.makers = {
            Op.INPUT: self._input, Op.F: self._forward, Op.A: self._forward, Op.B: self._backward,
            Op.BW: self._backward, Op.W: self._weight,
        }  # fmt: skip

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
        function, gather = self._function(it, number, call), self._arguments(it, number, block, segment, call)
        past, inputs = self._left("past"), self._place("inputs")
        degree, names = self._parts.graph.part(it).degree, block.names("past")

        def run(values: Values, step: StepRun) -> None:
            results = function(*gather(values))
            for i, place in kept:
                values[place] = results[i]
            if past is not None:
                values[past] = HeldPast(values[inputs], degree, names)
            if saved_b is not None:
                values[saved_b] = results[count:first]
            if saved_bw is not None:
                values[saved_bw] = results[first:second]

        return run

    def _backward(self, it: Instruction) -> Run:
        number, block, segment = self._segment(it)
        if not any(segment.joint.differentiable):
            return nothing
        if it.op is Op.BW and segment.trains:
            return self._fused(it, number, block, segment)
        call = segment.backward
        function, gather = self._function(it, number, call), self._arguments(it, number, block, segment, call)
        give, count, saved_w = self._giving(it, block, segment), len(segment.gives), self._left("saved_w")
        d_loss = self._d_loss(block, segment)

        def run(values: Values, step: StepRun) -> None:
            d_loss(values)
            results = function(*gather(values))
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
            return nothing
        weigh = self._weighing(it, number, block, segment, segment.weight)

        def run(values: Values, step: StepRun) -> None:
            weigh(values)

        return run

    def _weighing(
        self, it: Instruction, number: int, block: Block, segment: Segment, call: WeightCall
    ) -> Callable[[Values], Sequence[Tensor]]:
        """Calls a function that gives weight gradients and adds them up; returns all its results."""
        function, taken, gradients = self._function(it, number, call), call.num_taken, call.gradients
        gather = self._arguments(it, number, block, segment, call)
        names, add, stands_in = block.names("parameter"), self._adding(it, block), self._parts.stand_in is not None

        def weigh(values: Values) -> Sequence[Tensor]:
            given = gather(values)
            results = function(*given[:taken])
            if not stands_in:
                add(values, together(names, gradients(given, results)))
            return results

        return weigh

    def _adding(self, it: Instruction, block: Block) -> Callable[[Values, dict[str, Any]], None]:
        """Adds gradients to the sums of their buckets."""
        targets = {v.what: i for i, v in self._valued((*self._row.writes, *self._row.adds), "d_parameters")}
        home, op_index = self._parts.home, it.op_index or 0
        alone = ExactSum if self._parts.plan.sums_exactly else Sum
        by_name: dict[str, tuple[int, Callable[[], Any]]] = {}
        for name in dict.fromkeys(block.names("parameter")):
            bucket = home[name]
            place = targets.get(str(bucket), targets.get(f"{bucket}/{op_index}"))
            if place is not None:
                flat = self._parts.gradients.get(bucket)
                by_name[name] = place, flat.open if flat is not None else alone

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
        return self._scale(losses[0]) if losses else unscaled

    def _arguments(
        self, it: Instruction, number: int, block: Block, segment: Segment, call: Call
    ) -> Callable[[Values], list[Any]]:  # fmt: skip
        found = [self._argument(it, block, segment, source) for source in call.arguments]
        inputs = self._inputs[it.micro_batch or 0, it.half or 0]
        keys = tuple(key if isinstance(key, tuple) and len(key) == 4 else None for _, key in found)
        self._linked.calls.append(ComputeCall(it, number, segment, call, inputs, keys))
        return gathering(found)

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


def gathering(arguments: Sequence[Argument]) -> Callable[[Values], list[Any]]:
    """Takes arguments from where they lie: those that follow each other in one place all at once, because a backward
    takes dozens of tensors that its forward saved together."""
    kinds, found = "", []
    for place, run in groupby(arguments, key=itemgetter(0)):
        keys = [key for _, key in run]
        if len(keys) > 1 and None not in keys:
            kinds, found = f"{kinds}s", [*found, place, itemgetter(*keys)]
        else:
            kinds += "".join("w" if key is None else "o" for key in keys)
            found += [each for key in keys for each in (place, key)]
    return _gatherer(kinds)(*found)


_TAKEN = {"w": "values[place{}]", "o": "values[place{}][key{}]", "s": "*key{1}(values[place{0}])"}


@cache
def _gatherer(kinds: str) -> Callable[..., Callable[[Values], list[Any]]]:
    """Given places and keys, gives a function of one expression: a loop over them would take as long as all else that
    an instruction does. kinds: whether a whole value is taken, one of its parts, or several of them."""
    names = ", ".join(f"place{i}, key{i}" for i in range(len(kinds)))
    taken = ", ".join(_TAKEN[kind].format(i, i) for i, kind in enumerate(kinds))
    return eval(f"lambda {names}: lambda values: [{taken}]")
