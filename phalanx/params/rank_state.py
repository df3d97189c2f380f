"""The state of a rank: parameters, the optimizer's state, the scale of the loss; and all of it by the model's own
names, so that any other plan can take it up from there.

It is read one value at a time and given back as tensors for the shards that `layout_of` describes; where they come from
and go to is the caller's business, how they lie on the device is `buckets.py`'s. It knows no other rank.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from phalanx.comm.links import Group
from phalanx.config import RunConfig
from phalanx.params.buckets import Read
from phalanx.params.flat import Piece
from phalanx.params.groups import Groups
from phalanx.params.hosted import HostedOptimizer
from phalanx.params.layout_of import Kept, KeptSlot, StateLayout
from phalanx.params.loss_scale import LossScale
from phalanx.params.matrix_wise import Holders, MatrixWise
from phalanx.params.optimizer import Optimizer, make_optimizer
from phalanx.params.parameters import Parameters, Weight, load_parameters
from phalanx.state.layout import Box, StateShard

Filled = tuple[StateShard, Tensor]  # with its data


class Source(Protocol):
    """Where state is taken from: a checkpoint, or what came from other ranks."""

    def names(self) -> Sequence[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def read(self, name: str) -> Tensor: ...

    def read_flat(self, name: str, boxes: Sequence[Box]) -> Tensor: ...


class State:
    """What a rank keeps from step to step. read: gives the initial values. hosted: the buckets whose optimizer state
    lies on the host, each in so many parts. fetched: those whose parameters lie there. only_shards: see
    `load_parameters`."""

    def __init__(
        self, layout: StateLayout, rank: int, read: Read, config: RunConfig, device: torch.device,
        optimizer_class: type[Any] | None = None, groups: Groups | None = None,
        hosted: Mapping[int, int] | None = None, fetched: Collection[int] = (), only_shards: bool = False,
    ) -> None:  # fmt: skip
        self.layout, self._rank = layout, rank
        self.parameters = load_parameters(
            layout, rank, read, device=device, hosted=hosted or {}, fetched=fetched, only_shards=only_shards
        )
        elsewhere = {piece.name for bucket in hosted or {} for piece, _ in self.parameters.bucket(bucket).updated}
        weights = {name: weight for name, weight in self.parameters.trained.items() if name not in elsewhere}
        holders = None if hosted else Holders(layout, rank, device)
        inner = make_optimizer(weights, config, optimizer_class, groups, holders)
        self.optimizer = Optimizer(inner, weights, config.clip)
        self.hosted: HostedOptimizer | None = None
        if hosted:
            self.hosted = HostedOptimizer(
                self.parameters, hosted, lambda own: make_optimizer(own, config, optimizer_class, groups), config.clip,
                device, on_host=layout.plan.steps_on_host, on_device=layout.plan.updates_on_device,
            )  # fmt: skip
        self.loss_scale = LossScale(device) if config.dtype == "float16" else None

    def begin(self) -> None:
        """Before the first step: what the optimizer keeps on the device from then on."""
        used = {each.facts.name for each in self.layout.updated(self._rank)}
        self.optimizer.make_state(used)

    def connect(self, join: Callable[[tuple[int, ...]], Group]) -> None:
        """Where an optimizer needs tensors whole, its ranks exchange them."""
        inner = self.optimizer.inner
        if isinstance(inner, MatrixWise) and inner.ranks:
            inner.connect(join(inner.ranks))

    def settle(self) -> None:
        """Waits for everything that is on its way."""
        self.parameters.settle()
        if self.hosted is not None:
            self.hosted.settle()

    def enter(self, layout: StateLayout, rank: int) -> None:
        """From now on of this rank under this plan, for which everything lies as it does."""
        self.layout, self._rank = layout, rank

    def abandon(self) -> None:
        """The links to other ranks are broken: what this rank keeps is what it goes on from."""
        self.parameters.abandon()
        if self.hosted is not None:
            self.hosted.bring_home()

    def shards(self) -> Iterator[Filled]:
        """Everything a checkpoint holds, as far as it lies here."""
        self.settle()
        yield from of_checkpoint(self.layout, self.layout.kept(self._rank), self.parameters.weights, self._slots())
        yield from self.optimizer.owned()

    def _slots(self) -> Iterator[tuple[str, str, Tensor]]:
        """The optimizer's state by slot and parameter."""
        yield from self.optimizer.tensors()
        yield from self.hosted.tensors() if self.hosted is not None else ()

    def kept_slots(self) -> Iterator[tuple[str, KeptSlot]]:
        """What the optimizer keeps by now, by parameter."""
        for slot, name, tensor in self._slots():
            shape = None if tensor.shape == self.parameters.weights[name].exact.shape else tuple(tensor.shape)
            yield name, (slot, str(tensor.dtype).removeprefix("torch."), shape)
        shapes = {each.name: each.shape for each in self.layout.facts.parameters}
        for shard, _ in self.optimizer.owned():
            _, slot, name = shard.name.split("/", 2)
            yield name, (slot, shard.dtype, None if shard.shape == shapes[name] else shard.shape)

    def values(self) -> Iterator[Filled]:
        """The parameters alone, by their own names, in the precision of training."""
        self.settle()
        return of_parameters(self.layout, self._rank, self.parameters)

    def tensors(self) -> Iterator[Tensor]:
        """Everything that lies on the device from step to step."""
        yield from self.parameters.values.values()
        elsewhere = self.hosted.masters if self.hosted is not None else ()
        for name, weight in self.parameters.weights.items():
            if name in self.parameters.on_host:
                continue
            yield weight.copy
            yield from () if name in elsewhere else (weight.exact,)
        yield from (tensor for _, _, tensor in self.optimizer.tensors())

    def scalars(self) -> tuple[dict[str, Any], dict[str, float] | None]:
        """What a checkpoint holds beside tensors: of the optimizer, and of the scale of the loss where there is one."""
        self.settle()
        hosted = self.hosted.scalars() if self.hosted is not None else {}
        return self.optimizer.scalars() | hosted, self.loss_scale.state() if self.loss_scale else None

    def give_up(self) -> list[Filled]:
        """What `shards` gives, for another state to be made of; this one lets go of it, whoever still knows it."""
        held = list(self.shards())
        self.parameters.forget()
        self.optimizer.forget()
        if self.hosted is not None:
            self.hosted.close()
            self.hosted.forget()
        return held

    def restore(self, found: Source, optimizer: Mapping[str, Any], loss_scale: dict[str, float] | None) -> None:
        """Takes back what `shards` gave of the optimizer, as far as it concerns this rank, and what `scalars` gave."""

        def read(slot: str, name: str) -> Tensor:
            return from_checkpoint(found, f"optimizer/{slot}/{name}", self.parameters.weights[name].piece)

        keys = (name.split("/", 2) for name in found.names() if name.startswith("optimizer/"))
        slots = [(slot, name) for _, slot, name in keys]
        self.optimizer.load(slots, read, optimizer, lambda slot, name: found.read(f"optimizer/{slot}/{name}"))
        if self.hosted is not None:
            self.hosted.load(slots, read, optimizer)
        if self.loss_scale is not None and loss_scale is not None:
            self.loss_scale.load(loss_scale)


def of_parameters(state: StateLayout, rank: int, parameters: Parameters) -> Iterator[Filled]:
    """Parameters by their own names, in the precision of training."""
    for shard in state.parameters(rank):
        weight = parameters.weights[shard.name]
        yield shard, weight.piece.packed(weight.copy)


def of_checkpoint(
    state: StateLayout, pieces: Iterable[Kept], weights: Mapping[str, Weight], slots: Iterable[tuple[str, str, Tensor]]
) -> Iterator[Filled]:
    """Everything of these pieces that training must go on from. slots: of the optimizer's state, by parameter, what
    there is by now."""
    kept = {each.facts.name: each for each in pieces}
    for name, each in kept.items():
        yield state.exact(each), each.piece.packed(weights[name].exact)
    for slot, name, tensor in slots:
        each, key, dtype = kept[name], f"optimizer/{slot}/{name}", str(tensor.dtype).removeprefix("torch.")
        if tensor.shape == weights[name].exact.shape:
            yield each.shard(key, dtype), each.piece.packed(tensor)
        else:
            yield each.beside(key, dtype, tuple(tensor.shape)), tensor.reshape(-1)


def from_checkpoint(found: Source, key: str, piece: Piece) -> Tensor:
    """What `of_checkpoint` gave of a piece, in its shape, under whatever plan; a counter as it is."""
    is_counter = found.shape(key) != piece.local.shape
    return found.read(key) if is_counter else piece.shaped(piece.read(found, key))
