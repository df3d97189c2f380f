"""Mirrors that are kept current by gradients: how the ranks of a job begin with them, and whether they are worth it."""

from __future__ import annotations

import json

import torch

from phalanx.adapt.migrate import Arrived, gather, slots_now, updated_by
from phalanx.adapt.mirrors import lone_parameters, lone_state, mirror_of
from phalanx.adapt.portions import plan_migration
from phalanx.comm.links import Links
from phalanx.engine.mirroring import End, Gradients, Mirroring
from phalanx.params.layout_of import StateLayout
from phalanx.params.mirrored import Mirrored
from phalanx.params.optimizer import make_optimizer
from phalanx.session.change import everyone, everyones, links_of
from phalanx.session.session import Session
from phalanx.session.spare import Member
from phalanx.state.snapshot import Snapshot

MOST_SHARE = 0.01  # of the time of steps that mirrors may take, where nobody said how often copies are taken


def begin_mirroring(member: Member, step: int, on_trial: bool) -> tuple[Mirroring | None, int]:
    """What this rank does from now on, and how many bytes went between ranks; None where it has no place in the plan.
    All ranks of the job call this after the same step."""
    opening, group = member.opening, everyone(member)
    assert opening is not None
    layout, rank = member.state.layout, opening.context.rank
    has_place = isinstance(member, Session)
    nodes = [int(text) for text in group.texts(str(opening.context.node))]
    mirrors, names = mirror_of(nodes[: layout.plan.world]), lone_parameters(layout)
    filled = list(member.state.shards())
    updated = updated_by(layout, rank if has_place else None)
    slots = slots_now(layout, updated, [shard for shard, _ in filled], group)
    held = {shard.name: data for shard, data in filled}
    scalars, _ = everyones(group, *member.state.scalars())
    after = {mirrors[own]: lone_state(layout, own, names[own], slots) for own in mirrors}
    migration = plan_migration(layout, layout, layout.all_state(slots), after)
    arrived = gather(
        migration, held, rank=rank, group=group, device=opening.device, home=lambda name: torch.device("cpu")
    )
    links_of(member).open_channels((own, keeper, "m") for own, keeper in mirrors.items())
    if not has_place:
        return None, migration.bytes_sent
    kept = next(own for own, keeper in mirrors.items() if keeper == rank)
    data = {name: tensor.clone() if tensor is held.get(name) else tensor for name, tensor in arrived.items()}
    mirrored = Mirrored(
        layout, kept, names[kept], Arrived(after[rank], data), scalars,
        lambda weights: make_optimizer(weights, opening.config, opening.optimizer_class, opening.groups),
        opening.config.clip,
    )  # fmt: skip
    ends = _Ends(layout, links_of(member), opening.device, names)
    mirroring = Mirroring(ends.out(rank, mirrors[rank]), ends.into(kept), mirrored, step, on_trial)
    return mirroring, migration.bytes_sent


class Trial:
    """Whether mirrors that are kept current cost no more than their share of the time, as measured from the step after
    the first on: that one compiles. began: after which step. share: once it is known."""

    def __init__(self) -> None:
        self.began: int | None = None
        self.share: float | None = None
        self._since: tuple[int, float] | None = None

    def measure(self, live: Mirroring | None, member: Member, snapshot: Snapshot) -> bool:
        """On all ranks after the same step, twice; whether it is known now."""
        cost = live.cost() if live is not None else 0.0
        said = [json.loads(text) for text in everyone(member).texts(json.dumps([cost, snapshot.seconds]))]
        trained, before = said[0][1], self._since
        self._since = snapshot.step, trained
        if before is None:
            return False
        step_seconds = (trained - before[1]) / (snapshot.step - before[0])
        self.share = max(own for own, _ in said) / max(step_seconds, 1e-9)
        return True

    @property
    def is_cheap(self) -> bool:
        return self.share is not None and self.share <= MOST_SHARE


class _Ends:
    """What one rank sends and receives, and by which channels."""

    def __init__(
        self, layout: StateLayout, links: Links, device: torch.device, names: dict[int, frozenset[str]]
    ) -> None:
        self._layout, self._links, self._device, self._names = layout, links, device, names

    def out(self, rank: int, mirror: int) -> End | None:
        own = self._gradients(rank)
        return None if own is None else (own, self._links.channel(mirror, "m", "out"))

    def into(self, rank: int) -> End | None:
        """rank: whom it mirrors."""
        own = self._gradients(rank)
        return None if own is None else (own, self._links.channel(rank, "m", "in"))

    def _gradients(self, rank: int) -> Gradients | None:
        """Of what a rank alone holds."""
        updated = [kept.piece for kept in self._layout.updated(rank) if kept.facts.name in self._names[rank]]
        shapes = {
            piece.name: torch.Size(piece.shape if piece.is_whole else (piece.stop - piece.start,)) for piece in updated
        }
        return Gradients(shapes, getattr(torch, self._layout.facts.dtype), self._device) if shapes else None
