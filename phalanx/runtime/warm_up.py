"""Every block run once on zeros before a pipeline starts, for each new shape of micro-batch.

A message that is being received occupies the GPU until it arrives. Loading a kernel, which happens when it is first
launched, waits for all that the GPU is doing; two ranks that load kernels while each waits for a message of the other
would wait for ever. So all kernels are loaded, and all segments compiled, while nothing is on its way.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from phalanx.program.instructions import COMPUTE, Instruction, Op
from phalanx.runtime.compute import Compute
from phalanx.runtime.micro_batch import MicroBatch, StageRun
from phalanx.runtime.wires import Wires


class WarmUp:
    """For the blocks of a program, by the instructions it computes them with."""

    def __init__(
        self, compute: Compute, wires: Wires, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype
    ) -> None:
        self._compute, self._wires, self._shapes, self._dtype = compute, wires, shapes, dtype
        self._done: set[tuple[int, ...]] = set()

    def __call__(self, program: Iterable[Instruction], batches: Sequence[MicroBatch]) -> None:
        new = {tuple(batch.dims.values()): batch for batch in batches}
        new = {dims: batch for dims, batch in new.items() if dims not in self._done}
        if not new:
            return
        self._done.update(new)
        ops: dict[int, set[Op]] = {}
        for instruction in program:
            if instruction.op in COMPUTE and instruction.block is not None:
                ops.setdefault(instruction.block, set()).add(instruction.op)
        for batch in new.values():
            for number in ops:
                self._run(number, batch, ops[number])
        if self._compute.device.type == "cuda":
            torch.cuda.synchronize(self._compute.device)

    @torch.no_grad()
    def _run(self, number: int, batch: MicroBatch, ops: set[Op]) -> None:
        block, device = self._compute.blocks.blocks[number], self._compute.device
        zeros = {
            name: torch.zeros(self._shapes[name], dtype=self._dtype, device=device) for name in block.names("parameter")
        }
        compute = self._compute.on(zeros)
        run = StageRun()
        for wire, outline in self._wires.crossing(number, batch):
            run.wires[wire], run.differentiable[wire] = outline.empty(device).zero_(), outline.differentiable
        compute.forward(number, batch, run, keep=bool(ops - {Op.F}))
        kept = dict(run.saved)
        if Op.BW in ops:
            compute.backward_weight(number, run)
        if Op.B in ops:
            run.saved.update(kept)
            compute.backward(number, run)
        if Op.W in ops:
            compute.weight(number, run)
