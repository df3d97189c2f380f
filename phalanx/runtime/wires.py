"""What crosses each cut for each shape of micro-batch: known on every rank beforehand, so nobody has to announce it.

Every rank can run the whole model on tensors without contents, one distinct template at a time.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from phalanx.model.segment.joint import Outline
from phalanx.runtime.compute import Compute
from phalanx.runtime.micro_batch import MicroBatch, StageRun

Crossing = tuple[tuple[str, Outline], ...]


class Wires:
    """shapes: of every parameter of the model, also of those that live on other ranks."""

    def __init__(self, compute: Compute, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> None:
        self._compute = compute
        self._mode = FakeTensorMode()
        with self._mode:
            self._parameters = {
                name: torch.empty(shape, dtype=dtype, device=compute.device) for name, shape in shapes.items()
            }
        self._names: dict[int, tuple[str, ...]] = {}
        self._runs: dict[tuple[int, ...], list[dict[str, Outline]]] = {}  # per dims: what each block puts out

    def crossing(self, cut: int, batch: MicroBatch) -> Crossing:
        """The wires alive before block `cut`, in the order in which they are sent."""
        if cut not in self._names:
            self._names[cut] = self._compute.blocks.crossing(cut)
        known = {wire: found for block in self._outputs(cut, batch) for wire, found in block.items()}
        return tuple((wire, known[wire]) for wire in self._names[cut])

    def _outputs(self, cut: int, batch: MicroBatch) -> list[dict[str, Outline]]:
        done = self._runs.setdefault(tuple(batch.dims.values()), [])
        if len(done) < cut:
            run = StageRun()
            for found in done:
                self._put(found, run)
            for number in range(len(done), cut):
                block = self._compute.blocks.blocks[number]
                outlines = self._compute.outlines(number, batch, run, self._parameters)
                done.append(dict(zip(block.outputs, outlines, strict=True)))
                self._put(done[-1], run)
        return done[:cut]

    def _put(self, found: Mapping[str, Outline], run: StageRun) -> None:
        with self._mode:
            run.wires.update({wire: outline.empty(self._compute.device) for wire, outline in found.items()})
        run.differentiable.update({wire: outline.differentiable for wire, outline in found.items()})
