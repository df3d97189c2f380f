"""One step on one rank: its part of the batch is cut into micro-batches, and the program is run on them.

Nothing here reads a result from the device; `Outcome.read` does, whenever the caller wants it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from phalanx.errors import DataError, PlanError
from phalanx.model.captured import Captured
from phalanx.model.ops.random import sample_keys
from phalanx.model.slicing import TOKENS, WHOLE_TOKENS, Sliced
from phalanx.plan.plan import Plan
from phalanx.program.instructions import Program
from phalanx.runtime.compute import Compute
from phalanx.runtime.engine import Engine
from phalanx.runtime.micro_batch import MicroBatch, Place
from phalanx.runtime.portion import Portion
from phalanx.runtime.totals import StepRun
from phalanx.tasks.base import Batch


@dataclass(frozen=True)
class Outcome:
    """What a step gave, perhaps still on its way from the device."""

    values: Tensor  # loss, gradient norm, 1 if the update was made, ranks asked to stop, what was counted over all
    arrived: torch.cuda.Event | None

    @classmethod
    def of(cls, step: StepRun) -> Outcome:
        assert step.loss is not None and step.norm is not None and step.updated is not None
        values = torch.stack([step.loss, step.norm, step.updated.double(), *step.counted])
        if values.device.type != "cuda":
            return cls(values, None)
        on_host = torch.empty(values.shape, dtype=torch.float64, pin_memory=True)
        on_host.copy_(values, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        return cls(on_host, arrived)

    def read(self) -> tuple[float, float, bool]:
        """Loss, gradient norm, and whether the update was made; waits for the device."""
        if self.arrived is not None:
            while not self.arrived.query():  # not synchronize(): a rank that waits for a dead one must be stoppable
                time.sleep(1e-4)
        loss, norm, updated = self.values[:3].tolist()
        return loss, norm, bool(updated)

    def stops(self) -> bool:
        """Whether any rank was asked to stop by the end of this step; all ranks get the same answer."""
        self.read()
        return bool(self.values[3])

    def counted(self) -> list[float]:
        """The sums over all parts of the batch of what each rank was given to count."""
        self.read()
        return self.values[4:].tolist()


class Feeder:
    """Turns batches into micro-batches: checked, moved to the device, with their dropout keys. parts: by tensor degree,
    what its units see of a micro-batch where that is not all of it. sliced: how its tokens are cut, where the model
    runs on slices; then every micro-batch is given as its slices."""

    def __init__(
        self,
        captured: Captured,
        compute: Compute,
        *,
        seed: int,
        dtype: torch.dtype,
        parts: Mapping[int, Portion],
        sliced: Sliced | None = None,
    ) -> None:
        self.captured, self.compute, self._sliced = captured, compute, sliced
        self._seed, self._dtype, self._parts = seed, dtype, parts

    def micro_batches(self, batch: Batch, first: int, sizes: Sequence[int]) -> list[MicroBatch]:
        """Consecutive parts of the samples at stream positions from `first` on."""
        require_inputs(self.captured, batch)
        device = self.compute.device
        on_device = {name: self._move(tensor) for name, tensor in batch.items()}
        keys = sample_keys(self._seed, first, sum(sizes), device)
        parts: list[MicroBatch] = []
        begin = 0
        for size in sizes:
            inputs = {name: tensor[begin : begin + size] for name, tensor in on_device.items()}
            parts.append(self._micro_batch(inputs, keys[begin : begin + size]))
            begin += size
        return parts

    def slices(self, whole: MicroBatch, edges: Sequence[int] | None) -> list[MicroBatch]:
        """A micro-batch as its slices; as one where there are no edges, or as it is where the model is not sliced."""
        if self._sliced is None:
            return [whole]
        edges = (0, whole.dims["tokens"]) if edges is None else edges
        found = [self._slice(whole, start, stop) for start, stop in pairwise(edges)]
        for part in found:
            for degree, view in whole.views.items():
                part.views[degree] = self._slice(view, part.begin, part.begin + part.dims["tokens"])
        return found

    def _slice(self, whole: MicroBatch, start: int, stop: int) -> MicroBatch:
        sliced, samples = self._sliced, whole.keys.shape[0]
        assert sliced is not None
        inputs = {name: sliced.cut_input(name, tensor, start, stop) for name, tensor in whole.inputs.items()}
        values = {name: sliced.cut_value(name, v, samples, start, stop) for name, v in whole.values.items()}
        if start:  # what is counted is counted once
            count = self.captured.blocks.count
            values[count] = torch.zeros_like(values[count])
        dims = {**whole.dims, TOKENS: stop - start, WHOLE_TOKENS: whole.dims[TOKENS]}
        return MicroBatch(inputs, whole.keys, dims, values, whole.dropout, whole=whole, begin=start)

    def _micro_batch(self, inputs: dict[str, Tensor], keys: Tensor) -> MicroBatch:
        batch = self.compute.micro_batch(inputs, keys, self.captured.dims(inputs))
        for degree, portion in self._parts.items():
            rows = portion.of(keys.shape[0])
            fewer = {name: tensor[rows] for name, tensor in inputs.items()}
            batch.views[degree] = self.compute.micro_batch(fewer, keys[rows], self.captured.dims(fewer))
        return batch

    def _move(self, tensor: Tensor) -> Tensor:
        tensor = tensor.to(self._dtype) if tensor.is_floating_point() else tensor
        if self.compute.device.type != "cuda" or tensor.device.type == "cuda":
            return tensor
        return tensor.contiguous().pin_memory().to(self.compute.device, non_blocking=True)


class Step:
    """The training step of a plan on this rank."""

    def __init__(self, feeder: Feeder, engine: Engine, program: Program, plan: Plan) -> None:
        self.feeder, self.engine, self.program, self._plan = feeder, engine, program, plan
        engine.learn(program)

    def __call__(
        self, batch: Batch, first: int, lr: float, counts: Sequence[float] = (), stop: Callable[[], bool] | None = None
    ) -> Outcome:
        """Trains on this rank's part of the samples, which stand at stream positions from `first` on.

        counts: numbers about this part of the batch, to be summed over all parts. stop: whether this
        rank is asked to stop, asked when the step ends.
        """
        step = self.begin(batch, first, lr)
        step.counts, step.stop = tuple(counts), stop or step.stop
        self.engine.run(self.program, step)
        return Outcome.of(step)

    def begin(self, batch: Batch, first: int, lr: float) -> StepRun:
        sizes = split(num_samples(batch), self._plan.mb)
        halves = [half for size in sizes for half in split(size, self._plan.halves)]
        batches: list[MicroBatch] = []
        places: dict[Place, int] = {}
        for number, whole in enumerate(self.feeder.micro_batches(batch, first, halves)):
            micro_batch, half = divmod(number, self._plan.halves)
            edges = self._plan.slice_bounds(micro_batch, whole.dims[TOKENS]) if self._plan.slices else None
            for index, part in enumerate(self.feeder.slices(whole, edges)):
                places[micro_batch, index, half] = len(batches)
                batches.append(part)
        return StepRun(batches, lr, places=places)


def num_samples(batch: Mapping[str, Tensor]) -> int:
    return next(iter(batch.values())).shape[0]


def split(samples: int, parts: int) -> list[int]:
    """Sizes of `parts` micro-batches, as even as possible, larger ones first."""
    if parts > samples:
        raise PlanError(
            f"plan: mb={parts} cuts a batch of {samples} samples into more micro-batches than it has samples",
            f"use mb={samples} or less, or a larger batch_size",
        )
    size, larger = divmod(samples, parts)
    return [size + 1] * larger + [size] * (parts - larger)


def require_inputs(captured: Captured, batch: Batch) -> None:
    """The batch must be what the model was captured with: the same inputs, and the same sizes where they are fixed."""
    expected = {spec.name: spec for spec in captured.inputs}
    if set(batch) != set(expected):
        raise DataError(
            f"a batch holds {', '.join(sorted(batch))}, but the model was captured with {', '.join(sorted(expected))}",
            "training and evaluation data must give the same inputs in every batch",
        )
    for name, tensor in batch.items():
        dims = expected[name].dims
        fits = tensor.dim() == len(dims) and all(
            isinstance(dim, str) or dim == size for dim, size in zip(dims, tensor.shape, strict=True)
        )
        if not fits:
            raise DataError(
                f"input {name!r} has shape {list(tensor.shape)}, but the model was captured for "
                f"[{', '.join(map(str, dims))}]",
                "pad or cut samples to one size in the dataset or in collate",
            )


def training_flops(captured: Captured, batch: Batch, sizes: Sequence[int]) -> float:
    """Floating-point operations of one step: a backward costs twice its forward."""
    total = 0
    for size in set(sizes):
        dims = captured.dims({name: tensor[:size] for name, tensor in batch.items()})
        forward = sum(captured.blocks.flops(dims))
        total += 3 * forward * list(sizes).count(size)
    return float(total)
