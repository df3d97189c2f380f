"""Runs slices of some layers, forward and backward, as training would: the measuring function of a slice profile.

The layers are blocks of the captured model with weights of no meaning; what a slice attends to is there, as zeros in
the buffers of its past. What the times say, and where to cut, is for `slice_fit.py` and `planning/slice_search.py`.
"""

from __future__ import annotations

import copy
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.engine.compose import ExecutionGraph, bucket_names
from phalanx.engine.compute import Compute
from phalanx.engine.gradients import Sum, together
from phalanx.engine.inputs import Feeder, Inputs, num_samples
from phalanx.engine.trace import Tracer
from phalanx.model.graph.blocks import Block
from phalanx.model.interpret import tensor_ports
from phalanx.model.segment.compile import Compiler, resolve_mode
from phalanx.model.segment.segments import Segment, Source
from phalanx.model.shard.unsplit import unsplit
from phalanx.model.slicing import TOKENS, Sliced

SCALE = 0.02  # of weights: zeros would be multiplied with less power, and so faster
LOOPS = 2  # passes timed together: the next one is prepared while the device works, as in training


def layers(sliced: Sliced) -> tuple[int, ...]:
    """The blocks that are alike and attend to a past, of most kinds the one that the model has most of."""
    blocks = sliced.captured.blocks.blocks
    kinds = Counter(block.template for block in blocks if block.names("past"))
    (template, _), *_ = kinds.most_common(1)
    return tuple(number for number, block in enumerate(blocks) if block.template == template)


class SliceRun:
    """`run(tokens, past)` is the seconds of a slice, forward and backward, through `blocks` of a sliced model one after
    the other. The samples of `batch` are one micro-batch, of which all slices are."""

    def __init__(
        self,
        sliced: Sliced,
        batch: Mapping[str, Tensor],
        blocks: Sequence[int],
        *,
        dtype: torch.dtype,
        device: torch.device,
        compile: str = "off",
    ) -> None:
        captured, self._device, self._numbers = sliced.captured, device, tuple(blocks)
        self._blocks = [captured.blocks.blocks[number] for number in blocks]
        names = {name for block in self._blocks for name in block.names("parameter")}
        weights = {name: _weight(captured.shapes[name], dtype, device) for name in sorted(names)}
        buffers = captured.buffers_on(device)
        compute = Compute(
            captured.blocks, buffers, trainable=captured.trainable, device=device,
            compiler=Compiler(resolve_mode(compile, device)), products=True,
        )  # fmt: skip
        self._resident: dict[str, Mapping[str, Tensor]] = {
            "parameter": weights, "buffer": buffers, "constant": compute.constants,
        }  # fmt: skip
        self._sums = Sum()
        shape = bucket_names(captured.blocks, captured.trainable, None, sliced).shape
        graph = ExecutionGraph.of(captured.blocks, unsplit(captured.blocks))
        self._tracer = Tracer(graph, shape, compute, captured.shapes, dtype, blocks)
        self._feeder = Feeder(captured, compute, seed=0, dtype=dtype, degrees={}, sliced=sliced)
        self._batch, self._tokens = dict(batch), captured.dims(dict(batch))[TOKENS]

    @property
    def tokens(self) -> int:
        """Of the sequences that slices are cut from."""
        return self._tokens

    def first(self, count: int) -> SliceRun:
        """Through the first of the blocks alone, with the same functions."""
        other = copy.copy(self)
        other._numbers, other._blocks = self._numbers[:count], self._blocks[:count]
        return other

    def __call__(self, tokens: int, past: int) -> float:
        work = self._work(tokens, past)
        begin = self._now()
        for _ in range(LOOPS):
            self._backward(work, self._forward(work))
        return (self._now() - begin) / LOOPS

    def run(self, tokens: int, past: int) -> Callable[[], None]:
        """Runs a slice and does not wait until the device is done with it."""
        work = self._work(tokens, past)
        return lambda: self._backward(work, self._forward(work))

    def parts(self, tokens: int, past: int) -> tuple[float, float]:
        """Forward and backward apart."""
        work = self._work(tokens, past)
        begin = self._now()
        runs = self._forward(work)
        middle = self._now()
        self._backward(work, runs)
        return middle - begin, self._now() - middle

    def _work(self, tokens: int, past: int) -> list[_Layer]:
        (inputs,) = self._feeder(self._batch, 0, [num_samples(self._batch)], lambda _, all_of: (past, past + tokens))
        traced = self._tracer(inputs)
        needed = dict.fromkeys(name for block in self._blocks for name in (*block.names("activation"), *block.outputs))
        tensors = {name: _filled(traced.outlines[name].empty(self._device)) for name in needed}
        pairs = zip(self._numbers, self._blocks, strict=True)
        return [_Layer(block, traced.segments[n], inputs, tensors, self._resident) for n, block in pairs]

    @torch.no_grad()
    def _forward(self, work: Sequence[_Layer]) -> list[dict[str, Sequence[Tensor]]]:
        return [layer.forward() for layer in work]

    @torch.no_grad()
    def _backward(self, work: Sequence[_Layer], saved: Sequence[dict[str, Sequence[Tensor]]]) -> None:
        for layer, own in reversed(list(zip(work, saved, strict=True))):
            layer.backward(own, self._sums)

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


@dataclass(frozen=True)
class _Layer:
    """One block and what it is given for one slice: inputs, and gradients of outputs."""

    block: Block
    segment: Segment
    inputs: Inputs
    tensors: Mapping[str, Tensor]
    resident: Mapping[str, Mapping[str, Tensor]]

    def forward(self) -> dict[str, Sequence[Tensor]]:
        """What is left for the backward."""
        call, segment = self.segment.forward, self.segment
        results = call.function(*[self._argument(source, {}) for source in call.arguments])
        first = len(self.block.outputs)
        second = first + len(segment.saved_b)
        return {"saved_b": results[first:second], "saved_bw": results[second:]}

    def backward(self, saved: dict[str, Sequence[Tensor]], sums: Sum) -> None:
        call = self.segment.backward_weight
        arguments = [self._argument(source, saved) for source in call.arguments]
        gradients = call.gradients(arguments, call.function(*arguments[: call.num_taken]))
        sums.add(together(self.block.names("parameter"), gradients))

    def _argument(self, source: Source, saved: dict[str, Sequence[Tensor]]) -> Tensor:
        kind, number = source
        if kind in saved:
            return saved[kind][number]
        if kind != "port":
            return self.tensors[self.block.outputs[number]]
        port = tensor_ports(self.block)[number]
        if port.kind == "activation":
            return self.tensors[port.name]
        if port.kind in self.resident:
            return self.resident[port.kind][port.name]
        return self.inputs[0, 1, port.kind, port.name]


def _weight(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    value = torch.empty(shape, dtype=dtype, device=device)
    return value.normal_(0, SCALE) if len(shape) > 1 else value.fill_(1.0)


def _filled(tensor: Tensor) -> Tensor:
    return tensor.normal_() if tensor.is_floating_point() else tensor.zero_()
