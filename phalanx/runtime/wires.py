"""What crosses each cut for each shape of micro-batch: known on every rank beforehand, so nobody has to announce it.

Every rank can run the whole model on tensors without contents, one distinct template at a time.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from phalanx.model.segment.joint import Outline
from phalanx.runtime.anatomy import Anatomy
from phalanx.runtime.compute import Compute
from phalanx.runtime.micro_batch import MicroBatch, StageRun

Crossing = tuple[tuple[str, Outline], ...]


class Wires:
    """shapes: of every parameter of the model as far as it would lie here, also of those that live on other stages."""

    def __init__(
        self, anatomy: Anatomy, compute: Compute, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype
    ) -> None:
        self._anatomy, self._compute = anatomy, compute
        self._mode = FakeTensorMode()
        with self._mode:
            self._parameters = {
                name: torch.empty(shape, dtype=dtype, device=compute.device) for name, shape in shapes.items()
            }
        self._crossings: dict[tuple[int, ...], Crossing] = {}
        self._runs: dict[tuple[int, ...], list[dict[str, Outline]]] = {}  # per dims: what each block puts out

    def crossing(self, cut: int, batch: MicroBatch) -> Crossing:
        """The wires alive before block `cut`, in the order in which they are sent."""
        place = (cut, *batch.dims.values())
        if place not in self._crossings:
            known = self.before(cut, batch)
            self._crossings[place] = tuple((wire, known[wire]) for wire in self._anatomy.model.crossing(cut))
        return self._crossings[place]

    def before(self, cut: int, batch: MicroBatch) -> dict[str, Outline]:
        """Every wire that the blocks before block `cut` put out."""
        return {wire: found for block in self._outputs(cut, batch) for wire, found in block.items()}

    def _outputs(self, cut: int, batch: MicroBatch) -> list[dict[str, Outline]]:
        done = self._runs.setdefault(tuple(batch.dims.values()), [])
        if len(done) < cut:
            run = StageRun()
            for found in done:
                self._put(found, run)
            for number in range(len(done), cut):
                done.append(self._of_block(number, batch, run))
        return done[:cut]

    def _of_block(self, number: int, batch: MicroBatch, run: StageRun) -> dict[str, Outline]:
        found: dict[str, Outline] = {}
        for part in self._anatomy.parts[number]:
            if part.exchange is not None:
                exchange = part.exchange
                tensor, differentiable = run.wires[exchange.source], run.differentiable[exchange.source]
                shape = exchange.shape_after(tensor.shape, batch.view(part.degree).dims)
                new = {exchange.target: Outline(shape, tensor.dtype, differentiable)}
            else:
                assert part.segment is not None
                outlines = self._compute.outlines(part.segment, batch, run, self._parameters)
                new = dict(zip(self._compute.blocks.blocks[part.segment].outputs, outlines, strict=True))
            self._put(new, run)
            found |= new
        return found

    def _put(self, found: Mapping[str, Outline], run: StageRun) -> None:
        with self._mode:
            run.wires.update({wire: outline.empty(self._compute.device) for wire, outline in found.items()})
        run.differentiable.update({wire: outline.differentiable for wire, outline in found.items()})
