"""Every segment run once on zeros before ranks depend on each other, for each new shape of micro-batch and past.

A message that is being received occupies the GPU until it arrives. Loading a kernel, which happens when it is first
launched, waits for all that the GPU is doing; two ranks that load kernels while each waits for a message of the other
would wait for ever. So all kernels are loaded, and all segments compiled, while nothing is on its way.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from phalanx.model.graph.blocks import Block
from phalanx.model.segment.products import Gradient
from phalanx.program.instructions import COMPUTE, Instruction, Op
from phalanx.runtime.accumulate import Accumulator
from phalanx.runtime.anatomy import Anatomy
from phalanx.runtime.compute import Compute
from phalanx.runtime.micro_batch import MicroBatch, StageRun
from phalanx.runtime.wires import Wires


class WarmUp:
    """For the segments of a program, by what it does with them."""

    def __init__(
        self,
        anatomy: Anatomy,
        compute: Compute,
        wires: Wires,
        shapes: Mapping[str, tuple[int, ...]],
        dtype: torch.dtype,
    ) -> None:
        self._anatomy, self._compute, self._wires = anatomy, compute, wires
        self._shapes, self._dtype = shapes, dtype
        self._done: set[tuple[object, ...]] = set()

    def __call__(self, program: Iterable[Instruction], batches: Sequence[MicroBatch]) -> None:
        shapes = {(*batch.dims.values(), batch.begin): batch for batch in batches}
        ops: dict[tuple[int, int], set[Op]] = {}  # by block and segment
        for instruction in program:
            if instruction.op in COMPUTE and instruction.block is not None:
                place = (instruction.block, self._anatomy.segment(instruction))
                ops.setdefault(place, set()).add(instruction.op)
        new = [
            (block, number, batch, wanted)
            for shape, batch in shapes.items()
            for (block, number), wanted in ops.items()
            if (shape, number, frozenset(wanted)) not in self._done
        ]
        for block, number, batch, wanted in new:
            self._done.add(((*batch.dims.values(), batch.begin), number, frozenset(wanted)))
            self._run(block, number, batch, wanted)
            batch.forget_past()
        if new and self._compute.device.type == "cuda":
            torch.cuda.synchronize(self._compute.device)

    @torch.no_grad()
    def _run(self, block: int, number: int, batch: MicroBatch, ops: set[Op]) -> None:
        segment, device = self._compute.blocks.blocks[number], self._compute.device
        zeros = {name: torch.zeros(self._shapes[name], dtype=self._dtype, device=device)
                 for name in segment.names("parameter")}  # fmt: skip
        compute = self._compute.on(zeros)
        run = StageRun()
        known = self._wires.before(block + 1, batch)
        for wire in segment.names("wire"):
            run.wires[wire], run.differentiable[wire] = known[wire].empty(device).zero_(), known[wire].differentiable
        compute.forward(number, batch, run, keep=bool(ops - {Op.F, Op.A}) and Op.A not in ops)
        if Op.A in ops:
            for outputs in (True, False):
                compute.again(number, batch, run, outputs)
        kept = dict(run.saved)
        if Op.BW in ops:
            _add_up(segment, compute.backward_weight(number, run))
        if Op.B in ops:
            run.saved.update(kept)
            compute.backward(number, run)
        if Op.W in ops:
            _add_up(segment, compute.weight(number, run))


def _add_up(segment: Block, gradients: Sequence[Gradient]) -> None:
    sums = Accumulator()
    for _ in range(2):
        sums.add(segment.names("parameter"), gradients)
