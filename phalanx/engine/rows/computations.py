"""Calls of segments: forward, backward and weight gradients, and where their arguments lie."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
from phalanx.engine.rows.code import Code
from phalanx.engine.rows.maker import Linking, Maker, nothing
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
        code = Code()
        self._call(code, it, number, call, self._arguments(it, number, block, segment, call))
        for i, place in kept:
            code.line(f"values[{code.bind(place)}] = results[{i}]")
        if (past := self._left("past")) is not None:
            inputs, degree = self._place("inputs"), self._parts.graph.part(it).degree
            held = ", ".join(map(code.bind, (degree, block.names("past"))))
            code.line(f"values[{code.bind(past)}] = {code.bind(HeldPast)}(values[{code.bind(inputs)}], {held})")
        for saved, begin, end in ((saved_b, count, first), (saved_bw, first, second)):
            if saved is not None:
                code.line(f"values[{code.bind(saved)}] = results[{begin}:{end}]")
        return code.run()

    def _backward(self, it: Instruction) -> Run:
        number, block, segment = self._segment(it)
        if not any(segment.joint.differentiable):
            return nothing
        if it.op is Op.BW and segment.trains:
            return self._fused(it, number, block, segment)
        code, call = Code(), segment.backward
        self._scale_loss(code, block, segment)
        self._call(code, it, number, call, self._arguments(it, number, block, segment, call))
        self._give(code, block, segment)
        if (saved_w := self._left("saved_w")) is not None:
            code.line(f"values[{code.bind(saved_w)}] = results[{len(segment.gives)}:]")
        return code.run()

    def _fused(self, it: Instruction, number: int, block: Block, segment: Segment) -> Run:
        code = Code()
        self._scale_loss(code, block, segment)
        self._weigh(code, it, number, block, segment, segment.backward_weight)
        self._give(code, block, segment)
        return code.run()

    def _weight(self, it: Instruction) -> Run:
        number, block, segment = self._segment(it)
        if not segment.trains or not any(segment.joint.differentiable):
            return nothing
        code = Code()
        self._weigh(code, it, number, block, segment, segment.weight)
        return code.run()

    def _call(self, code: Code, it: Instruction, number: int, call: Call, arguments: Sequence[Argument]) -> None:
        code.line(f"results = {code.bind(self._function(it, number, call))}({code.taken(arguments)})")

    def _weigh(
        self, code: Code, it: Instruction, number: int, block: Block, segment: Segment, call: WeightCall
    ) -> None:
        """Calls a function that gives weight gradients, and adds them up."""
        arguments, taken = self._arguments(it, number, block, segment, call), call.num_taken
        if self._parts.stand_in is not None:
            self._call(code, it, number, call, arguments[:taken])
            return
        names, gradients, add = block.names("parameter"), call.gradients, self._adding(it, block)

        def add_up(values: Values, given: list[Any], results: Sequence[Tensor]) -> None:
            add(values, together(names, gradients(given, results)))

        code.line(f"given = [{code.taken(arguments)}]")
        code.line(f"results = {code.bind(self._function(it, number, call))}(*given[:{taken}])")
        code.line(f"{code.bind(add_up)}(values, given, results)")

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

    def _give(self, code: Code, block: Block, segment: Segment) -> None:
        """Adds the gradients of inputs, the first of a function's results, to their sums."""
        ports = tensor_ports(block)
        targets = {v.what: i for i, v in self._valued((*self._row.adds, *self._row.writes), "gradient")}
        earlier = {v.what: i for i, v in self._valued(self._row.reads, "gradient") if i != targets.get(v.what)}
        unwritten = {*self._row.writes} - {*earlier.values()}
        for i, port in enumerate(segment.gives):
            name = self._names.gradient.get(ports[port].name, ports[port].name)
            place, before = targets[name], earlier.pop(name, targets[name])
            if before in unwritten:
                code.line(f"values[{code.bind(place)}] = results[{i}]")
            else:
                code.line(f"there = values[{code.bind(before)}]")
                code.line(f"values[{code.bind(place)}] = results[{i}] if there is None else there + results[{i}]")
            unwritten.discard(place)

    def _scale_loss(self, code: Code, block: Block, segment: Segment) -> None:
        """Where a segment puts the loss out, its gradient is one over the number of items."""
        outputs = zip(block.outputs, segment.joint.outputs, strict=True)
        losses = [node.meta["val"].dtype for name, node in outputs if self._names.is_d_loss(name)]
        if losses:
            code.line(f"{code.bind(self._scale(losses[0]))}(values)")

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
