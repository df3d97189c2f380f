"""The state of a run whose ranks are others than before: from those that are left, else from a checkpoint.

All ranks of the new generation call this with what they said to each other (`held.py`). What a rank holds stays as it
was until its new state is complete, so that losing another rank meanwhile loses nothing more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from phalanx.adapt.holdings import Part, Place, joined, present
from phalanx.adapt.migrate import Arrived, gather, slots_now, updated_by
from phalanx.adapt.mirrors import beside, lone_parameters, lone_state, missing, stays
from phalanx.adapt.portions import plan_migration
from phalanx.comm.links import Group, Links
from phalanx.engine.compiled import Compiled
from phalanx.engine.layout import ProcessGroups
from phalanx.params.layout_of import SlotsOf, StateLayout
from phalanx.params.mirrored import Mirrored
from phalanx.params.rank_state import State
from phalanx.plan.plan import Plan
from phalanx.session.held import Held
from phalanx.session.mirror import Copy, layout_of_copies
from phalanx.session.placing import homes, made, same_place
from phalanx.session.session import Opening, Session
from phalanx.session.spare import Member, Spare
from phalanx.state.layout import Layout, StateShard


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
        layouts = {plan: self._layout_of(plan, held) for place in places.values() for plan in place.plans}
        kept = held.mirrored if held is not None and _lost_of_mirror(self._rank, places) else None
        filled = [*(held.filled() if held is not None else []), *([list(kept.shards())] if kept is not None else [])]
        slots = self._slots(held, kept, [shard for own in filled for shard, _ in own])
        before: dict[int, tuple[StateShard, ...]] = {}
        data: dict[str, Tensor] = {}
        for rank in places:
            before[rank] = ()
            for number, shards in enumerate(self._held_by(rank, places, layouts, slots)):
                more = _besides(shards, before[rank])
                before[rank] = beside(before[rank], more)
                if rank == self._rank:
                    data |= joined(data, filled[number], {shard.name for shard in more})
        return self._from(before, data, slots, held, scalars)

    def _held_by(
        self, rank: int, places: Mapping[int, Place], layouts: Mapping[Plan, StateLayout], slots: SlotsOf
    ) -> Iterator[Iterable[StateShard]]:
        """Part by part; at last what it mirrors, where the rank that had it is lost."""
        for part in places[rank].parts:
            yield part.shards(layouts[part.plan], slots)
        if (lost := _lost_of_mirror(rank, places)) is not None:
            layout = layouts[lost.plan]
            shards = lone_state(layout, lost.rank, lone_parameters(layout)[lost.rank], slots)
            self.mirrors += [f"of rank {lost.rank} from the mirror on rank {places[rank].rank}"] if shards else []
            yield shards

    def _slots(self, held: Held | None, kept: Mirrored | None, shards: Iterable[StateShard]) -> SlotsOf:
        """What optimizers keep by now. kept: what is mirrored here and needed."""
        layout = held.state.layout if held is not None else self.layout
        updated = [*(held.updated if held is not None else ()), *(kept.updated if kept is not None else ())]
        return slots_now(layout, updated, _once(shards), self._group)

    def from_copies(
        self, places: Mapping[int, int], copy: Copy | None, plan: Plan, scalars: Scalars
    ) -> State | list[str] | None:  # fmt: skip
        """The same, of what ranks of a plan copied after a step. places: whose copy each has; copy: this rank's."""
        layout = self._layout_of(plan)
        own, rank = (copy.own, copy.rank) if copy is not None and copy.own else ((), None)
        slots = slots_now(layout, updated_by(layout, rank), own, self._group)
        copied = layout_of_copies(layout, set(places.values()), slots)
        before: Layout = {rank: copied[own] for rank, own in places.items()}
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
        if held is not None and isinstance(held.state, State) and self._stays(held, held.state, self.compiled):
            held.state.enter(self.layout, self._rank)
            held.state.parameters.collect_all(self._connected.gather)
            return held.state
        source, optimizer = Arrived(after[self._rank], arrived), dict(scalars.optimizer)
        state = made(self.opening, self.compiled, source, optimizer, scalars.loss_scale)
        state.parameters.collect(self._connected.gather)
        return state

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

    def _stays(self, held: Held, state: State, compiled: Compiled) -> bool:
        hosted = set(state.hosted.buckets) if state.hosted is not None else set[int]()
        same_homes = hosted == set(compiled.hosted()) and held.plan.offload == self.plan.offload
        return same_homes and same_place(state.layout, held.rank, self.layout, self._rank)

    def _layout_of(self, plan: Plan, held: Held | None = None) -> StateLayout:
        for layout in held.layouts if held is not None else ():
            if plan == layout.plan:
                return layout
        return self.layout if plan == self.plan else self.opening.layout(plan)


def _besides(shards: Iterable[StateShard], own: Sequence[StateShard]) -> list[StateShard]:
    """Of these, what a rank does not have in the same boxes, as counters may be."""
    held = {shard.name: shard.boxes for shard in own}
    return [shard for shard in shards if shard.boxes != held.get(shard.name)]


def _once(shards: Iterable[StateShard]) -> list[StateShard]:
    """One of each name."""
    return list({shard.name: shard for shard in shards}.values())


def _lost_of_mirror(rank: int, places: Mapping[int, Place]) -> Part | None:
    """Whose state this rank mirrors, if that rank is lost."""
    place = places.get(rank)
    if place is None or place.mirror is None or place.mirror.rank in present(places.values(), place.plans):
        return None
    return place.mirror


def lost_with_mirrors(places: Sequence[Place]) -> list[str]:
    """What is said of ranks that nobody who is left mirrors, where ranks mirror each other."""
    found: list[str] = []
    for plan in {place.mirror.plan: None for place in places if place.mirror is not None}:
        own = [place for place in places if plan in place.plans]
        mirrored = {place.mirror.rank for place in own if place.mirror is not None}
        plans = {each for place in own for each in place.plans}
        gone = set(range(plan.world)) - mirrored - present(places, plans)
        found += [f"no mirror of rank {rank} was left" for rank in sorted(gone)]
    return found


def together(said: Sequence[Mapping[str, Any]]) -> Scalars:
    """Of what all ranks that hold state said."""
    optimizer: dict[str, Any] = {}
    for own in reversed(said):
        optimizer |= own["optimizer"]
    return Scalars(optimizer, next((own["loss_scale"] for own in said if own["loss_scale"] is not None), None))
