"""What no rank knows alone: the items of the global batch, its loss, the norm of all gradients; and the update.

Every rank ends up with the same numbers, so all clip alike and all skip a step that is not finite alike. Nothing here
waits for a device.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from phalanx.comm.links import Group, Pending
from phalanx.runtime.loss_scale import LossScale
from phalanx.runtime.micro_batch import MicroBatch, Place
from phalanx.runtime.optimizer import Optimizer


@dataclass
class StepRun:
    """One step on its way through a program."""

    batches: list[MicroBatch]
    lr: float
    items: Tensor | None = None  # of the global batch
    counting: Pending | None = None
    gradients: dict[str, Tensor] = field(default_factory=dict)  # of this rank's pieces, once NORM has run
    norm: Tensor | None = None
    loss: Tensor | None = None  # per item
    updated: Tensor | None = None
    stop: Callable[[], bool] = lambda: False  # whether this rank is asked to stop; all do if one is
    counts: tuple[float, ...] = ()  # about this rank's part of the batch
    counted: tuple[Tensor, ...] = ()  # how many ranks are asked to stop; and counts over all parts
    places: Mapping[Place, int] = field(default_factory=dict)  # number of each part; empty where they are micro-batches

    def batch(self, place: Place) -> MicroBatch:
        return self.batches[self.places[place] if self.places else place[0]]

    def slices(self, place: Place) -> list[MicroBatch]:
        """All slices of a place's micro-batch, in order."""
        micro_batch, _, half = place
        found = (self.batches[number] for (m, _, h), number in self.places.items() if (m, h) == (micro_batch, half))
        return list(found) or [self.batch(place)]


class Totals:
    """owned: the pieces that this rank, of all that hold them, answers for. count: the value that counts items.
    counts: whether what this rank counts about its part of the batch is added up, once per part. speaks: whether its
    loss is, which all ranks of a tensor-parallel group know."""

    def __init__(
        self, optimizer: Optimizer, count: str, replicas: Group, world: Group, owned: Collection[str],
        *, counts: bool = True, speaks: bool = True, loss_scale: LossScale | None = None,
    ) -> None:  # fmt: skip
        self._optimizer, self._count, self._owned, self._counts = optimizer, count, set(owned), counts
        self._replicas, self._world, self._speaks, self._loss_scale = replicas, world, speaks, loss_scale

    def count(self, step: StepRun) -> None:
        step.items = total_items(step.batches, self._count)
        step.counting = self._replicas.all_reduce(step.items)

    def scale(self, step: StepRun) -> Tensor:
        """The gradient of each summed loss."""
        items = self._items(step)
        return items.reciprocal() if self._loss_scale is None else self._loss_scale.value / items

    def norm(self, step: StepRun, gradients: dict[str, Tensor]) -> None:
        items = self._items(step)
        step.gradients = gradients
        owned = {name: gradient for name, gradient in gradients.items() if name in self._owned}
        square = self._optimizer.squared_norm(owned, items)
        loss = total_loss(step.batches if self._speaks else (), items)
        counts = [float(step.stop()), *(count if self._counts else 0.0 for count in step.counts)]
        # Filled there, not copied there: a copy from ordinary memory would wait for the whole backward.
        sums = torch.stack([square, loss, *(torch.full_like(loss, count) for count in counts)])
        self._world.all_reduce(sums).wait("the gradients' norm")
        step.norm, step.loss, step.counted = sums[0].sqrt(), sums[1] / items, sums[2:].unbind()
        if self._loss_scale is not None:
            step.norm = step.norm / self._loss_scale.value

    def step(self, step: StepRun) -> None:
        assert step.norm is not None and step.loss is not None, "NORM comes before STEP"
        scale = None if self._loss_scale is None else self._loss_scale.value
        finite = step.norm.isfinite() & step.loss.isfinite()
        self._optimizer.step(step.gradients, step.lr, step.norm, finite, scale)
        if self._loss_scale is not None:
            self._loss_scale.update(finite)
        step.gradients, step.updated = {}, finite

    def _items(self, step: StepRun) -> Tensor:
        if step.items is None:
            step.items = total_items(step.batches, self._count)
        if step.counting is not None:
            step.counting.wait("the number of items")
            step.counting = None
        return step.items


def total_items(batches: Sequence[MicroBatch], count: str) -> Tensor:
    """How many items the losses of these micro-batches are sums over."""
    return torch.stack([batch.values[count].double() for batch in batches]).sum()


def total_loss(batches: Sequence[MicroBatch], like: Tensor) -> Tensor:
    """The summed loss; zero on ranks that do not hold the last stage."""
    losses = [batch.loss.double() for batch in batches if batch.loss is not None]
    return torch.stack(losses).sum() if losses else torch.zeros_like(like)
