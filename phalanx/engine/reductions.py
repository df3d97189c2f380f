"""What no rank knows alone: the items of the global batch, its loss, the norm of all gradients; and the update.

Every rank ends up with the same numbers, so all clip alike and all skip a step that is not finite alike. Nothing here
waits for a device.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from phalanx.comm.links import Group
from phalanx.engine.inputs import Inputs
from phalanx.engine.mirroring import Mirroring
from phalanx.engine.redistribute import Arriving
from phalanx.params import exact
from phalanx.params.hosted import Given
from phalanx.params.loss_scale import LossScale
from phalanx.params.optimizer import Optimizer, norms_of

Place = tuple[int, int]  # micro-batch, half


@dataclass
class StepRun:
    """One run of a program: its micro-batches, the values while it runs, and what it found."""

    inputs: dict[Place, Inputs]  # those that no instruction has taken yet
    lr: float | None  # None: as it stands in the optimizer
    gradients: dict[str, Tensor] = field(default_factory=dict)  # of this rank's pieces, once NORM has run
    items: Tensor | None = None  # of the global batch
    norm: Tensor | None = None
    loss: Tensor | None = None  # per item
    losses: dict[int, Tensor] = field(default_factory=dict)  # by micro-batch, summed over its parts that ran here
    updated: Tensor | None = None
    unscaled: bool = False  # whether the gradients are free of the scale of the loss by now
    most_loss: float | None = None  # a step with a larger loss does not update
    stop: Callable[[], bool] = lambda: False  # whether this rank is asked to stop; all do if one is
    change: Callable[[], bool] = lambda: False  # whether this rank is asked for another plan; all hear of it
    counts: tuple[float, ...] = ()  # about this rank's part of the batch
    counted: tuple[Tensor, ...] = ()  # ranks asked to stop, ranks asked for another plan; and counts over all parts
    on_host: Callable[[], Given] | None = None  # what the host updates by
    commits: bool = False  # whether the host waits for the norm before anything is updated
    mirroring: Mirroring | None = None
    reduced: bool = False  # whether the gradients of this rank's pieces are complete
    sums: Tensor | None = None  # what NORM found over all ranks; with it a rank can end the step without the others
    linked: Any = None  # the program as calls
    values: list[Any] = field(default_factory=list[Any])  # per value of the table
    position: int = 0


class GlobalReductions:
    """owned: the pieces that this rank, of all that hold them, answers for. counts: whether what this rank counts about
    its part of the batch is added up, once per part. is_tp_leader: whether its loss is, which all ranks of a
    tensor-parallel group know. exactly: the norm and the loss do not depend on who adds up what (`params/exact.py`)."""

    def __init__(
        self, optimizer: Optimizer, replicas: Group, world: Group, owned: Collection[str],
        *, counts: bool = True, is_tp_leader: bool = True, loss_scale: LossScale | None = None, exactly: bool = False,
    ) -> None:  # fmt: skip
        self._optimizer, self._owned, self._counts, self._exactly = optimizer, set(owned), counts, exactly
        self._replicas, self._world, self._is_tp_leader, self._loss_scale = replicas, world, is_tp_leader, loss_scale

    def count(self, step: StepRun) -> Arriving:
        items = total_items(step.inputs.values())
        return Arriving(self._replicas.all_reduce(items), lambda: items)

    def scale(self, items: Tensor) -> Tensor:
        """The gradient of each summed loss."""
        return items.reciprocal() if self._loss_scale is None else self._loss_scale.value / items

    def norms(self, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Those of gradients that leave, as far as this rank answers for them."""
        return (words_of if self._exactly else norms_of)(self._of_owned(gradients))

    def _of_owned(self, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: gradient for name, gradient in gradients.items() if name in self._owned}

    def norm(
        self, step: StepRun, items: Tensor, losses: Sequence[Tensor], gradients: dict[str, Tensor],
        left: Mapping[str, Tensor] | None = None,
    ) -> Tensor:  # fmt: skip
        """left: norms of gradients that are on the host."""
        step.items, step.gradients = items, step.gradients | gradients
        square = self._squared_norm(self._of_owned(gradients), items, left)
        loss = total_loss(losses if self._is_tp_leader else (), items, self._exactly)
        counts = [float(step.stop()), float(step.change()), *(count if self._counts else 0.0 for count in step.counts)]
        # Filled there, not copied there: a copy from ordinary memory would wait for the whole backward.
        sums = torch.cat([square, loss, *(torch.full_like(loss[:1], count) for count in counts)])
        if step.mirroring is not None:
            step.mirroring.exchange(step.gradients, self._world)
        step.reduced = True
        self._world.all_reduce(sums).wait("the gradients' norm")
        if step.commits:
            self._world.confirm(sums, "the gradients' norm")
        return self.found(step, sums)

    def found(self, step: StepRun, sums: Tensor) -> Tensor:
        """Takes what NORM sums over all ranks; all of them have reduced their gradients then."""
        assert step.items is not None
        width = exact.NUM_WORDS if self._exactly else 1
        square, loss, step.sums = sums[:width], sums[width : 2 * width], sums
        step.norm, step.loss = number(square).sqrt(), number(loss) / step.items
        step.counted = sums[2 * width :].unbind()
        if self._loss_scale is not None:
            step.norm = step.norm / self._loss_scale.value
        return step.norm

    def norm_of(self, gradients: Mapping[str, Tensor], like: Tensor) -> Tensor:
        """The norm of the gradients of all ranks, as one vector."""
        square = self._squared_norm(self._of_owned(gradients), like)
        self._world.all_reduce(square).wait("the gradients' norm")
        return number(square).sqrt()

    def _squared_norm(
        self, gradients: Mapping[str, Tensor], like: Tensor, left: Mapping[str, Tensor] | None = None
    ) -> Tensor:
        """A row of numbers, to be added to those of other ranks."""
        if self._exactly:
            return exact.together([*words_of(gradients).values(), *(left or {}).values()], like)
        return self._optimizer.squared_norm(gradients, like, left).view(1)

    def given(self, step: StepRun) -> Given:
        """What an update goes by."""
        assert step.norm is not None and step.loss is not None, "NORM comes before STEP"
        scale = None if self._loss_scale is None or step.unscaled else self._loss_scale.value
        sound = step.norm.isfinite() & step.loss.isfinite()
        sound = sound if step.most_loss is None else sound & (step.loss <= step.most_loss)
        return Given(step.lr, step.norm, sound, scale)

    def given_on_host(self, step: StepRun) -> Callable[[], Given]:
        """The same on its way to the host, once a step; called, it waits."""
        if step.on_host is None:
            step.on_host = _to_host(self.given(step))
        return step.on_host

    def step(self, step: StepRun) -> None:
        """The update of what is updated on the device, as a whole."""
        given = self.given(step)
        if step.mirroring is not None:
            step.mirroring.update(self.given_on_host(step))
        gradients = {name: own for name, own in step.gradients.items() if name in self._optimizer.weights}
        self._optimizer.step(gradients, *given)
        if self._loss_scale is not None:
            assert step.norm is not None and step.loss is not None
            self._loss_scale.update(step.norm.isfinite() & step.loss.isfinite())  # a spike is no overflow
        step.gradients, step.updated = {}, given.finite


def _to_host(given: Given) -> Callable[[], Given]:
    if given.norm.device.type != "cuda":
        return lambda: given
    numbers = [given.norm, given.finite.double(), *([] if given.loss_scale is None else [given.loss_scale])]
    on_host = torch.empty(len(numbers), dtype=torch.float64, pin_memory=True)
    on_host.copy_(torch.stack([number.double() for number in numbers]), non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record()

    def read() -> Given:
        arrived.synchronize()
        norm, finite, *scale = on_host.unbind()
        return Given(given.lr, norm, finite.bool(), scale[0] if scale else None)

    return read


def total_items(parts: Collection[Inputs] | Mapping[Place, Inputs]) -> Tensor:
    """How many items the losses of these micro-batches are sums over."""
    return torch.stack([part.count() for part in (parts.values() if isinstance(parts, Mapping) else parts)]).sum()


def total_loss(losses: Sequence[Tensor], like: Tensor, exactly: bool = False) -> Tensor:
    """The summed loss as a row of numbers; zero on ranks that do not hold the last stage."""
    if exactly:
        return exact.together([exact.words(loss) for loss in losses], like)
    return torch.stack([loss.double() for loss in losses]).sum().view(1) if losses else torch.zeros_like(like).view(1)


def words_of(gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The square of each one's norm, as `params/exact.py` adds it up."""
    return {name: exact.words_of_squares(gradient) for name, gradient in gradients.items()}


def number(row: Tensor) -> Tensor:
    """What such a row stands for."""
    return exact.total(row) if len(row) == exact.NUM_WORDS else row[0]
