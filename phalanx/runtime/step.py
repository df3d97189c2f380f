"""One step in one process: a batch is cut into micro-batches, the program is run on them, the optimizer is called.

Evaluation is the same without gradients and dropout. Nothing here reads a result from the device; `Outcome.read` does,
whenever the caller wants it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.errors import DataError, PlanError
from phalanx.model.captured import Captured
from phalanx.model.graph.expressions import evaluate as value_of
from phalanx.model.ops.random import sample_keys
from phalanx.plan.plan import Plan
from phalanx.program.expand import expand
from phalanx.runtime.accumulate import Accumulator
from phalanx.runtime.engine import Engine, MicroBatch
from phalanx.runtime.optimizer import Optimizer
from phalanx.tasks.base import Batch


@dataclass(frozen=True)
class Outcome:
    """What a step gave, perhaps still on its way from the device."""

    values: Tensor  # [3]: loss, gradient norm, 1 if the update was made
    arrived: torch.cuda.Event | None

    @classmethod
    def of(cls, loss: Tensor, norm: Tensor, updated: Tensor) -> Outcome:
        values = torch.stack([loss.double(), norm.double(), updated.double()])
        if values.device.type != "cuda":
            return cls(values, None)
        on_host = torch.empty(3, dtype=torch.float64, pin_memory=True)
        on_host.copy_(values, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        return cls(on_host, arrived)

    def read(self) -> tuple[float, float, bool]:
        """Loss, gradient norm, and whether the update was made; waits for the device."""
        if self.arrived is not None:
            self.arrived.synchronize()
        loss, norm, updated = self.values.tolist()
        return loss, norm, bool(updated)


class Feeder:
    """Turns batches into micro-batches of an engine: checked, moved to the device, with their dropout keys."""

    def __init__(self, captured: Captured, engine: Engine, *, seed: int, dtype: torch.dtype) -> None:
        self.captured, self.engine = captured, engine
        self._seed, self._dtype = seed, dtype

    def micro_batches(self, batch: Batch, first: int, sizes: Sequence[int]) -> list[MicroBatch]:
        """Consecutive parts of the samples at stream positions from `first` on."""
        require_inputs(self.captured, batch)
        device = self.engine.device
        on_device = {name: self._move(tensor) for name, tensor in batch.items()}
        keys = sample_keys(self._seed, first, sum(sizes), device)
        parts: list[MicroBatch] = []
        begin = 0
        for size in sizes:
            inputs = {name: tensor[begin : begin + size] for name, tensor in on_device.items()}
            dims = self.captured.dims(inputs)
            parts.append(self.engine.micro_batch(inputs, keys[begin : begin + size], dims))
            begin += size
        return parts

    def _move(self, tensor: Tensor) -> Tensor:
        tensor = tensor.to(self._dtype) if tensor.is_floating_point() else tensor
        if self.engine.device.type != "cuda" or tensor.device.type == "cuda":
            return tensor
        return tensor.pin_memory().to(self.engine.device, non_blocking=True)


class Step:
    """The training step of a plan."""

    def __init__(self, feeder: Feeder, optimizer: Optimizer, plan: Plan) -> None:
        self.feeder, self.optimizer, self.plan = feeder, optimizer, plan
        self._program = expand(plan)
        self._accumulator = Accumulator()

    def __call__(self, batch: Batch, first: int, lr: float) -> Outcome:
        """Trains on the samples at stream positions from `first` on."""
        sizes = split(num_samples(batch), self.plan.mb)
        engine = self.feeder.engine
        parts = self.feeder.micro_batches(batch, first, sizes)
        items = total_items(engine, parts)
        engine.run(self._program, parts, items.reciprocal(), self._accumulator)
        loss = total_loss(parts) / items
        gradients = self._accumulator.take(self.optimizer.weights)
        return Outcome.of(loss, *self.optimizer.step(gradients, lr, loss))


@torch.no_grad()
def evaluate(feeder: Feeder, batches: Iterator[tuple[int, Batch]]) -> float:
    """The mean loss per item over (stream position, batch) pairs, each run as one micro-batch, forward only."""
    loss, items = 0.0, 0.0
    for first, batch in batches:
        parts = feeder.micro_batches(batch, first, [num_samples(batch)])
        feeder.engine.forward(parts[0], keep=False)
        loss += float(total_loss(parts))
        items += float(total_items(feeder.engine, parts))
    return loss / items if items else float("nan")


def total_items(engine: Engine, parts: Sequence[MicroBatch]) -> Tensor:
    """How many items the losses of these micro-batches are sums over."""
    return torch.stack([part.values[engine.blocks.count].double() for part in parts]).sum()


def total_loss(parts: Sequence[MicroBatch]) -> Tensor:
    losses = [part.loss.double() for part in parts if part.loss is not None]
    assert len(losses) == len(parts), "every micro-batch has been forward"
    return torch.stack(losses).sum()


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
        blocks = captured.blocks
        forward = sum(
            value_of(text, dims) for block in blocks.blocks for text in blocks.templates[block.template].flops.values()
        )
        total += 3 * forward * list(sizes).count(size)
    return float(total)
