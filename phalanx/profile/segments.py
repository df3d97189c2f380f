"""How long the segments of a model take on this device: forward, backward, weight gradients, and the last two together.

A segment is run as a rank runs it, on activations and weights without meaning, by turns with copies of itself, so that
its weights come from memory as those of other layers would. Which segments there are follows from a plan; blocks of one
template share theirs, so that few are measured. What is kept of it is `model.py`'s business.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from hashlib import sha256
from itertools import cycle
from typing import Any, NamedTuple

import torch
from torch import Tensor

from phalanx.engine.compiled import Compiled
from phalanx.engine.gradients import Sum, together
from phalanx.engine.inputs import Inputs
from phalanx.engine.step import micro_batches
from phalanx.model.graph.blocks import Block
from phalanx.model.interpret import tensor_ports
from phalanx.model.segment.segments import Segment, Source, WeightCall
from phalanx.tasks.base import Batch

SCALE = 0.02  # of weights: zeros would be multiplied with less power, and so faster
MOST_COPIES = 4
MOST_TIMES = 100
PARTS = ("forward", "backward", "weight", "together")


class SegmentTimes(NamedTuple):
    """Seconds; together: of input and weight gradients at once."""

    forward: float
    backward: float
    weight: float
    together: float


class Effort(NamedTuple):
    """How long one part of a segment is measured. seconds: of a round, in which it is run so often at least. beside:
    runs before and after those that count, so that all ranks are at it meanwhile: they do not begin at the same moment,
    and in a short round some have a core to themselves."""

    rounds: int = 5
    seconds: float = 0.02
    least: int = 2
    warm_up: int = MOST_COPIES
    beside: int = 0


class Place(NamedTuple):
    """Where a segment stands: an op of a block."""

    block: int
    op_index: int


class Found(NamedTuple):
    """A segment that a plan runs. block: what is run, of which `copies` are in the model. name: tells its graph, its
    shapes and how it is compiled from others."""

    segment: Segment
    block: Block
    degree: int
    places: list[Place]
    name: str


class Segments:
    """The distinct segments of a model under a plan of one rank, for the first micro-batch of a batch."""

    def __init__(self, compiled: Compiled, batch: Batch) -> None:
        self._compiled = compiled
        self._inputs = next(iter(micro_batches(compiled.training.feeder, compiled.plan, batch, 0).values()))
        traced = compiled.training.tracer(self._inputs)
        found: dict[int, Found] = {}
        for number, parts in enumerate(compiled.graph.parts):
            for index, part in enumerate(parts):
                if part.segment is None:
                    continue
                segment, block = traced.segments[part.segment], compiled.graph.segment(part)
                own = found.get(id(segment))
                if own is None:
                    name = _name(compiled, block, segment)
                    own = found[id(segment)] = Found(segment, block, part.degree, [], name)
                own.places.append(Place(number, index))
        self.found = list(found.values())

    def copies(self, found: Found) -> list[SegmentRun]:
        """As many as the model has, or enough that one does not find its weights where it left them."""
        compute = self._compiled.training.compute
        resident = {"buffer": compute.buffers, "constant": compute.constants}
        count = min(MOST_COPIES, len(found.places))
        return [SegmentRun(found, self._inputs, resident, compute.device) for _ in range(count)]


def _name(compiled: Compiled, block: Block, segment: Segment) -> str:
    """What decides how long it takes, apart from device and versions."""
    shapes = [(tuple(node.meta["val"].shape), str(node.meta["val"].dtype)) for node in segment.joint.inputs]
    text = compiled.graph.segments.templates[block.template].text
    kept = [len(names) for names in (segment.saved_b, segment.saved_bw, segment.saved_w)]
    how = (shapes, segment.gives, segment.trains, kept, compiled.compiler.mode)
    return sha256(f"{text}{how}".encode()).hexdigest()[:16]


class SegmentRun:
    """One segment with everything that it is called with."""

    def __init__(
        self, found: Found, inputs: Inputs, resident: Mapping[str, Mapping[str, Tensor]], device: torch.device
    ) -> None:
        self._segment, self._block, self._sums = found.segment, found.block, Sum()
        self._values: dict[Source, Tensor] = {}
        for number, port in enumerate(tensor_ports(found.block)):
            if port.kind in ("activation", "parameter"):
                look = found.segment.like(("port", number))
                self._values["port", number] = _filled(look, device, SCALE if port.kind == "parameter" else 1.0)
            elif port.kind in resident:
                self._values["port", number] = resident[port.kind][port.name]
            else:
                self._values["port", number] = inputs[0, found.degree, port.kind, port.name]
        self._fill(device)

    @torch.no_grad()
    def _fill(self, device: torch.device) -> None:
        """With what a forward and a backward leave behind."""
        segment = self._segment
        left = [("output", len(segment.joint.outputs)), ("saved_b", len(segment.saved_b))]
        left += [("saved_bw", len(segment.saved_bw))]
        names: list[Source] = [(kind, number) for kind, count in left for number in range(count)]
        self._values.update(zip(names, self.forward(), strict=True))
        taken = [i for i, needed in enumerate(segment.joint.differentiable) if needed]
        for number in taken:
            self._values["gradient", number] = _filled(segment.like(("gradient", number)), device, 1.0)
        if taken:
            results = self.backward()[len(segment.gives) :]
            self._values.update({("saved_w", number): value for number, value in enumerate(results)})

    def part(self, name: str) -> Callable[[], Any] | None:
        """What runs it; None where there is nothing to do."""
        segment = self._segment
        if name != "forward" and not any(segment.joint.differentiable):
            return None
        if name == "weight" and not segment.trains:
            return None
        if name == "together" and not segment.trains:
            return self.backward
        weighing = {"weight": lambda: segment.weight, "together": lambda: segment.backward_weight}
        return partial(self._weigh, weighing[name]()) if name in weighing else getattr(self, name)

    def forward(self) -> Any:
        call = self._segment.forward
        return call.function(*[self._values[source] for source in call.arguments])

    def backward(self) -> Any:
        call = self._segment.backward
        return call.function(*[self._values[source] for source in call.arguments])

    def _weigh(self, call: WeightCall) -> None:
        arguments = [self._values[source] for source in call.arguments]
        results = call.function(*arguments[: call.num_taken])
        self._sums.add(together(self._block.names("parameter"), call.gradients(arguments, results)))


def _filled(look: Tensor, device: torch.device, scale: float) -> Tensor:
    value = torch.empty_strided(look.shape, look.stride(), dtype=look.dtype, device=device)
    return value.normal_(0, scale) if look.is_floating_point() else value.zero_()


Meet = Callable[[float], float]  # with all ranks that measure at the same time: the largest of their numbers


@torch.no_grad()
def time_part(copies: list[SegmentRun], name: str, device: torch.device, meet: Meet, effort: Effort) -> float:
    """Seconds of one part of a segment: the median of a few rounds, in each of which all ranks run equally many."""
    parts = [part for own in copies if (part := own.part(name)) is not None]
    return usual_seconds(cycle(parts).__next__, device, meet, effort) if parts else 0.0


def usual_seconds(
    next_work: Callable[[], Callable[[], Any]], device: torch.device, meet: Meet, effort: Effort
) -> float:
    def run(times: int) -> float:
        begin = time.perf_counter()
        for _ in range(times):
            next_work()()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return (time.perf_counter() - begin) / max(1, times)

    def timed(times: int) -> float:
        meet(0.0)
        _, seconds, _ = run(effort.beside), run(times), run(effort.beside)
        return seconds

    once = meet(timed(effort.warm_up))
    times = max(effort.least, min(MOST_TIMES, int(effort.seconds / max(once, 1e-7))))
    return statistics.median(timed(times) for _ in range(effort.rounds))


def alone(number: float) -> float:
    """For one rank that measures by itself."""
    return number


def time_segment(
    segments: Segments, found: Found, device: torch.device, meet: Meet = alone, effort: Effort | None = None
) -> SegmentTimes:
    copies = segments.copies(found)
    return SegmentTimes(*(time_part(copies, name, device, meet, effort or Effort()) for name in PARTS))
