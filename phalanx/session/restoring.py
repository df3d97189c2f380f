"""The state of a run whose ranks are others than before: from those that are left, else from a checkpoint.

All ranks of the new generation call this with what they said to each other (`held.py`). What a rank holds stays as it
was until its new state is complete, so that losing another rank meanwhile loses nothing more.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from phalanx.adapt.migrate import Arrived, gather, slots_now
from phalanx.adapt.mirrors import beside, lone_parameters, lone_state, missing, stays
from phalanx.adapt.portions import plan_migration
from phalanx.comm.links import Group, Links
from phalanx.engine.compiled import Compiled
from phalanx.engine.layout import ProcessGroups
from phalanx.params.layout_of import SlotsOf, StateLayout
from phalanx.params.mirrored import Mirrored
from phalanx.params.rank_state import Filled, State
from phalanx.plan.plan import Plan
from phalanx.session.change import homes, made, same_place
from phalanx.session.held import Held
from phalanx.session.mirror import Copy, layout_of_copies
from phalanx.session.session import Opening, Session
from phalanx.session.spare import Member, Spare
from phalanx.state.layout import Layout, StateShard


@dataclass(frozen=True)
class Place:
    """Whose state a rank holds: of a plan, as a rank of it. mirrors: another rank of it whose state it has besides."""

    plan: Plan
    rank: int
    mirrors: int | None = None


@dataclass(frozen=True)
class Scalars:
    """What the ranks' optimizers keep besides tensors, together, and the scale of the loss."""

    optimizer: Mapping[str, Any]
    loss_scale: dict[str, float] | None


class Restoring:
    """One rank's part in one generation. compiled: None where the plan has no place for it. layout: of the plan."""

    def __init__(
        self, opening: Opening, plan: Plan, compiled: Compiled | None, layout: StateLayout, links: Links, group: Group
    ) -> None:
        self.opening, self.plan, self.compiled, self.layout = opening, plan, compiled, layout
        self._links, self._group, self.bytes = links, group, 0
        self.mirrors: list[str] = []  # that were used, in words
        self._connected = ProcessGroups(compiled.formation, links, owns_links=True) if compiled is not None else None
        opening.told(links, plan)

    @property
    def _rank(self) -> int:
        return self.opening.context.rank

    def from_ranks(self, places: Mapping[int, Place], held: Held | None, scalars: Scalars) -> State | list[str] | None:
        """The state of this rank (None if it has no place), or the tensors of which something is lost. places: by rank
        of this generation, those that hold what is to be gone on from; held: where this rank is one of them."""
        if not places:
            return [each.name for each in self.layout.facts.parameters]
        layouts = {place.plan: self._layout_of(place.plan, held) for place in places.values()}
        filled = list(held.state.shards()) if held is not None else []
        kept = self._kept(places, held)
        own = layouts[held.plan] if held is not None else self.layout
        mirrored = list(kept.shards()) if kept is not None else []
        slots = slots_now(
            own, held.rank if held else None, _once(shard for shard, _ in (*filled, *mirrored)), self._group,
            kept.updated if kept is not None else (),
        )  # fmt: skip
        before: Layout = {rank: layouts[place.plan].state(place.rank, slots) for rank, place in places.items()}
        data = {shard.name: data for shard, data in filled}
        for rank, place, lost in _mirrored(places):
            more = _lone_besides(layouts[place.plan], lost, slots, before[rank])
            before[rank] = beside(before[rank], more)
            self.mirrors += [f"of rank {lost} from the mirror on rank {place.rank}"] if more else []
            if rank == self._rank:
                data |= _joined(data, mirrored, {shard.name for shard in more})
        return self._from(before, data, slots, held, scalars)

    def _kept(self, places: Mapping[int, Place], held: Held | None) -> Mirrored | None:
        """What this rank mirrors, if that was lost."""
        is_needed = any(rank == self._rank for rank, _, _ in _mirrored(places))
        return held.mirrored if held is not None and is_needed else None

    def from_copies(
        self, places: Mapping[int, Place], copy: Copy | None, plan: Plan, scalars: Scalars
    ) -> State | list[str] | None:  # fmt: skip
        """The same, of what ranks of a plan copied after a step. copy: this rank's."""
        layout = self._layout_of(plan)
        own, rank = (copy.own, copy.rank) if copy is not None and copy.own else ((), None)
        slots = slots_now(layout, rank, own, self._group)
        copied = layout_of_copies(layout, {place.rank for place in places.values()}, slots)
        before: Layout = {rank: copied[place.rank] for rank, place in places.items()}
        data = {name: tensor.clone() for name, tensor in copy.data.items()} if copy is not None else {}
        return self._from(before, data, slots, None, scalars)

    def _from(
        self, before: Layout, data: dict[str, Tensor], slots: SlotsOf, held: Held | None, scalars: Scalars
    ) -> State | list[str] | None:  # fmt: skip
        after, home = self.layout.all_state(slots), homes(self.opening, self.compiled)
        if stays(before, after):
            own = {shard.name: data[shard.name] for shard in after.get(self._rank, ())}
            return self._state_of({name: tensor.to(home(name)) for name, tensor in own.items()}, after, held, scalars)
        if lost := missing(before, after):
            return lost
        migration = plan_migration(self.layout, self.layout, before, after)
        self.bytes = migration.bytes_sent
        arrived = gather(migration, data, rank=self._rank, group=self._group, device=self.opening.device, home=home)
        return self._state_of(arrived, after, held, scalars)

    def _state_of(self, arrived: dict[str, Tensor], after: Layout, held: Held | None, scalars: Scalars) -> State | None:
        if self.compiled is None or self._connected is None:
            return None
        if held is not None and self._stays(held, self.compiled):
            held.state.enter(self.layout, self._rank)
            held.state.parameters.collect_all(self._connected.gather)
            return held.state
        source, optimizer = Arrived(after[self._rank], arrived), dict(scalars.optimizer)
        return made(self.opening, self.compiled, source, optimizer, scalars.loss_scale, self._connected.gather)

    def from_reader(self, read: Callable[..., Tensor]) -> State | None:
        """Of a checkpoint, or the initial values."""
        if self.compiled is None:
            return None
        state = self.opening.state(self.compiled, read)
        state.connect(lambda ranks: self._links.group(ranks, "matrices"))
        return state

    def member(self, state: State | None) -> Member:
        """What this rank is from now on."""
        slot = self.opening.context.slot
        if state is None or self.compiled is None or self._connected is None:
            slot.set_place("spare")
            return Spare(self.plan, self.opening, self._links)
        slot.set_place(self.compiled.formation.place)
        return Session(self.compiled, self._connected, state, self.opening.watches, self.opening)

    def _stays(self, held: Held, compiled: Compiled) -> bool:
        hosted = set(held.state.hosted.buckets) if held.state.hosted is not None else set[int]()
        same_homes = hosted == set(compiled.hosted()) and held.plan.offload == self.plan.offload
        return same_homes and same_place(held.state.layout, held.rank, self.layout, self._rank)

    def _layout_of(self, plan: Plan, held: Held | None = None) -> StateLayout:
        if held is not None and plan == held.plan:
            return held.state.layout
        return self.layout if plan == self.plan else self.opening.layout(plan)


def _lone_besides(layout: StateLayout, lost: int, slots: SlotsOf, own: Sequence[StateShard]) -> list[StateShard]:
    """Of what a lost rank alone held, what the rank that mirrors it does not have itself, as counters may be."""
    held = {shard.name: shard.boxes for shard in own}
    mirrored = lone_state(layout, lost, lone_parameters(layout)[lost], slots)
    return [shard for shard in mirrored if shard.boxes != held.get(shard.name)]


def _joined(data: Mapping[str, Tensor], mirrored: Iterable[Filled], names: Collection[str]) -> dict[str, Tensor]:
    """What is mirrored, of these names, behind what a rank has of them itself; on the host."""
    found = {shard.name: tensor for shard, tensor in mirrored if shard.name in names}
    return {
        name: torch.cat([data[name].to(tensor.device), tensor]) if name in data else tensor
        for name, tensor in found.items()
    }


def _once(shards: Iterable[StateShard]) -> list[StateShard]:
    """One of each name."""
    return list({shard.name: shard for shard in shards}.values())


def _mirrored(places: Mapping[int, Place]) -> Iterator[tuple[int, Place, int]]:
    """Who mirrors a rank that was lost, and which."""
    alive = {(place.plan, place.rank) for place in places.values()}
    for rank, place in places.items():
        if place.mirrors is not None and (place.plan, place.mirrors) not in alive:
            yield rank, place, place.mirrors


def lost_with_mirrors(places: Sequence[Place]) -> list[str]:
    """What is said of ranks that nobody who is left mirrors, where ranks mirror each other."""
    found: list[str] = []
    for plan in {place.plan: None for place in places if place.mirrors is not None}:
        own = [place for place in places if place.plan == plan]
        gone = set(range(plan.world)).difference(*((place.rank, place.mirrors) for place in own))
        found += [f"no mirror of rank {rank} was left" for rank in sorted(gone)]
    return found


def together(said: Sequence[Mapping[str, Any]]) -> Scalars:
    """Of what all ranks that hold state said."""
    optimizer: dict[str, Any] = {}
    for own in reversed(said):
        optimizer |= own["optimizer"]
    return Scalars(optimizer, next((own["loss_scale"] for own in said if own["loss_scale"] is not None), None))
