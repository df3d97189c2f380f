"""What ranks hold of a run's state, told in so few words that every rank knows from them which boxes lie where.

A rank that trains holds all that its plan gives it. One that is interrupted while state moves holds some parameters,
with all their state, as the old plan lays them out, others as the new one does, and those of a portion that had come
but was not agreed on as both.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from phalanx.adapt.portions import Migration, parameter_of
from phalanx.engine.mirroring import Mirroring
from phalanx.params.layout_of import SlotsOf, StateLayout
from phalanx.params.rank_state import Filled
from phalanx.plan.plan import Plan
from phalanx.state.layout import StateShard


@dataclass(frozen=True)
class Part:
    """The state of a rank of a plan. names: the parameters of which it is held (default: all)."""

    plan: Plan
    rank: int
    names: frozenset[str] | None = None

    def shards(self, layout: StateLayout, slots: SlotsOf) -> Iterator[StateShard]:
        """layout: of the plan."""
        for shard in layout.state(self.rank, slots):
            if self.names is None or parameter_of(shard.name) in self.names:
                yield shard


@dataclass(frozen=True)
class Place:
    """What a rank holds. mirror: of another rank, whose state it has besides."""

    parts: tuple[Part, ...]
    mirror: Part | None = None

    @property
    def rank(self) -> int:
        return self.parts[0].rank

    @property
    def plans(self) -> set[Plan]:
        """Where there are two, a change from one to the other was under way, in which ranks keep their numbers."""
        return {part.plan for part in (*self.parts, *filter(None, [self.mirror]))}


def present(places: Iterable[Place], plans: Collection[Plan]) -> set[int]:
    """The ranks of these plans that are left."""
    return {part.rank for place in places for part in place.parts if part.plan in plans}


@dataclass
class Moving:
    """State of a rank on its way from one layout to another. What stands in `old` or `new`, by name, is all there.
    optimizer, loss_scale: what there is besides tensors. mirroring: of what another rank held alone."""

    rank: int
    layout: StateLayout
    to: StateLayout
    migration: Migration
    old: dict[str, Tensor]
    optimizer: dict[str, Any]
    loss_scale: dict[str, float] | None
    mirroring: Mirroring | None = None
    new: dict[str, Tensor] = field(default_factory=dict[str, Tensor])

    @property
    def parts(self) -> list[Part]:
        """What is held of either layout, as far as there is any."""
        return [Part(layout.plan, self.rank, names) for layout, names, _ in self._sides()]

    @property
    def updated(self) -> list[str]:
        """The parameters of which an optimizer that has updated them has state here."""
        return [
            kept.facts.name for layout, names, _ in self._sides() for kept in layout.updated(self.rank)
            if kept.facts.name in names
        ]  # fmt: skip

    def filled(self) -> list[list[Filled]]:
        """Of each part."""
        return [filled for _, _, filled in self._sides()]

    def scalars(self) -> tuple[dict[str, Any], dict[str, float] | None]:
        return self.optimizer, self.loss_scale

    def abandon(self) -> None:
        """Nothing is on its way to it but what is not trusted."""

    def _sides(self) -> Iterator[tuple[StateLayout, frozenset[str], list[Filled]]]:
        sides = ((self.layout, self.migration.old, self.old), (self.to, self.migration.new, self.new))
        for layout, given, data in sides:
            filled = [(shard, data[shard.name]) for shard in given.get(self.rank, ()) if shard.name in data]
            if filled:
                yield layout, frozenset(parameter_of(shard.name) for shard, _ in filled), filled


def joined(data: Mapping[str, Tensor], more: Iterable[Filled], names: Collection[str]) -> dict[str, Tensor]:
    """What a rank has of these names besides, behind what it has of them already; there, and on its device."""
    found = {shard.name: tensor for shard, tensor in more if shard.name in names}
    return {
        name: torch.cat([data[name].to(tensor.device), tensor]) if name in data else tensor
        for name, tensor in found.items()
    }
