"""Runs slices of some layers, forward and backward, as training would: the measuring function of a slice profile.

The layers are blocks of the captured model with weights of no meaning; what a slice attends to is there, as zeros in
the buffers of its past. What the times say, and where to cut, is for `slice_fit.py` and `plan/slice_search.py`.
"""

from __future__ import annotations

import copy
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.model.segment.compile import Compiler, resolve_mode
from phalanx.model.segment.joint import Outline
from phalanx.model.slicing import TOKENS, Sliced
from phalanx.runtime.accumulate import Accumulator
from phalanx.runtime.anatomy import Anatomy
from phalanx.runtime.compute import Compute
from phalanx.runtime.micro_batch import MicroBatch, StageRun
from phalanx.runtime.step import Feeder, num_samples
from phalanx.runtime.wires import Wires

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
        self._compute = Compute(
            captured.blocks, {name: _weight(captured.shapes[name], dtype, device) for name in sorted(names)},
            {name: value.to(device) for name, value in captured.buffers.items()}, trainable=captured.trainable,
            device=device, compiler=Compiler(resolve_mode(compile, device)), products=True,
        )  # fmt: skip
        self._sums = Accumulator()
        self._wires = Wires(Anatomy.of(captured.blocks, None), self._compute, captured.shapes, dtype)
        feeder = Feeder(captured, self._compute, seed=0, dtype=dtype, parts={}, sliced=sliced)
        self._whole, self._feeder = feeder.micro_batches(dict(batch), 0, [num_samples(batch)])[0], feeder

    @property
    def tokens(self) -> int:
        """Of the sequences that slices are cut from."""
        return self._whole.dims[TOKENS]

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

    def parts(self, tokens: int, past: int) -> tuple[float, float]:
        """Forward and backward apart."""
        work = self._work(tokens, past)
        begin = self._now()
        runs = self._forward(work)
        middle = self._now()
        self._backward(work, runs)
        return middle - begin, self._now() - middle

    def _work(self, tokens: int, past: int) -> _Work:
        (part,) = self._feeder.slices(self._whole, (past, past + tokens))
        known = self._wires.before(max(self._numbers) + 1, part)
        needed = {wire for block in self._blocks for wire in (*block.names("wire"), *block.outputs)}
        return _Work(part, known, {wire: _filled(known[wire].empty(self._device)) for wire in needed})

    @torch.no_grad()
    def _forward(self, work: _Work) -> list[StageRun]:
        runs = [work.begin(block.names("wire")) for block in self._blocks]
        for number, run in zip(self._numbers, runs, strict=True):
            self._compute.forward(number, work.part, run, keep=True)
        return runs

    @torch.no_grad()
    def _backward(self, work: _Work, runs: Sequence[StageRun]) -> None:
        for number, block, run in reversed(list(zip(self._numbers, self._blocks, runs, strict=True))):
            run.gradients.update({wire: work.tensors[wire] for wire in block.outputs if run.differentiable[wire]})
            self._sums.add(block.names("parameter"), self._compute.backward_weight(number, run))

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


@dataclass(frozen=True)
class _Work:
    """One slice and what its blocks are given: inputs, and gradients of outputs."""

    part: MicroBatch
    known: Mapping[str, Outline]
    tensors: Mapping[str, Tensor]

    def begin(self, wires: Sequence[str]) -> StageRun:
        return StageRun(
            {wire: self.tensors[wire] for wire in wires}, {wire: self.known[wire].differentiable for wire in wires}
        )


def _weight(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    value = torch.empty(shape, dtype=dtype, device=device)
    return value.normal_(0, SCALE) if len(shape) > 1 else value.fill_(1.0)


def _filled(tensor: Tensor) -> Tensor:
    return tensor.normal_() if tensor.is_floating_point() else tensor.zero_()
