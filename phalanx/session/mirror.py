"""Copies of a run's state in the memory of its ranks, for what one rank alone holds.

Either what another rank holds alone is kept current by its gradients, and no step that counts is repeated
(`mirroring.py`). Or after some steps every rank copies its own state to host memory, and what the rank before it holds
alone comes to it and is kept beside. So whatever one rank held at that step, another still has; all ranks go back to
that step together. Two copies are kept, because a loss in the middle of taking one leaves ranks that have it and ranks
that have not.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from phalanx.adapt.migrate import gather, slots_now, updated_by
from phalanx.adapt.mirrors import beside, lone_parameters, mirrored
from phalanx.adapt.portions import Migration, plan_migration
from phalanx.engine.mirroring import Mirroring
from phalanx.params.layout_of import SlotsOf, StateLayout
from phalanx.params.matrix_wise import MatrixWise
from phalanx.params.mirrored import checksums
from phalanx.params.optimizer import is_muon
from phalanx.plan.plan import Plan
from phalanx.session.change import everyone, everyones
from phalanx.session.mirroring import MOST_SHARE, Trial, begin_mirroring
from phalanx.session.session import Session
from phalanx.session.spare import Member
from phalanx.state.layout import Layout, StateShard
from phalanx.state.snapshot import Snapshot

_NUM_KEPT = 2
_TRIAL_STEPS = 5  # in which it is measured what mirrors cost that are kept current


@dataclass(frozen=True)
class Copy:
    """State after so many steps, as a rank of a plan keeps it. own: the shards that were its own; data: of those and of
    what it keeps for another; sums: by which it is recognised as undamaged. scalars: of all ranks' optimizers."""

    plan: Plan
    rank: int
    step: int
    own: tuple[StateShard, ...]
    data: Mapping[str, Tensor]
    sums: list[int]
    snapshot: dict[str, Any]
    optimizer: dict[str, Any]
    loss_scale: dict[str, float] | None

    @property
    def is_sound(self) -> bool:
        return checksums(self.data.values()) == self.sums

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.data.values())


class Mirror:
    """One rank's copies. every: steps between them, 0: `live` is kept current; None: that, unless it costs more than a
    hundredth of the time; then so seldom that they do not."""

    def __init__(self, every: int | None) -> None:
        self._every, self._next = every, 1.0 if every else 0.0
        self.live: Mirroring | None = None
        self._trial = Trial()
        self.copies: list[Copy] = []
        self._migrations: dict[Plan, Migration] = {}

    def is_due(self, step: int) -> bool:
        """After a step."""
        return step >= self._next

    def renew(self) -> None:
        """Another plan, or ranks that were lost with their copies: the next one is due at once."""
        self._next, self._trial = 0.0, Trial()
        self._end_live()

    def take(self, member: Member, snapshot: Snapshot) -> dict[str, Any]:
        """On all ranks after the same step; what is said of it."""
        if (none := _why_none(member)) is not None:
            self.copies, self._next = [], math.inf
            return {"step": snapshot.step, "none": none}
        if self._trial.began is None and not self._every:
            return self._begin(member, snapshot)
        if self._trial.share is None and self._every is None:
            if not self._trial.measure(self.live, member, snapshot):
                self._next = snapshot.step + _TRIAL_STEPS
                return {}
            if self._trial.is_cheap:
                self._next = math.inf
                if self.live is not None:
                    self.live.on_trial = False
                return self._said(snapshot)
            self._end_live()
        began = time.perf_counter()
        del self.copies[: 1 - _NUM_KEPT]  # all ranks have the newest: each has ended a step since
        copy, sent = self._copied(member, snapshot)
        seconds = time.perf_counter() - began
        said = [json.loads(text) for text in everyone(member).texts(json.dumps([seconds, snapshot.seconds]))]
        slowest, trained = max(own for own, _ in said), said[0][1]
        self.copies.append(copy)
        every = self._every or seldom_enough(slowest, trained, snapshot.step)
        self._next = snapshot.step + every
        record = {"step": snapshot.step, "every": every, "bytes": copy.bytes, "moved": sent, "seconds": slowest}
        return record if self._trial.share is None else record | {"share": self._trial.share}

    def _begin(self, member: Member, snapshot: Snapshot) -> dict[str, Any]:
        """With mirrors that are kept current: for good, or on trial from the step after next on."""
        began, self._trial.began = time.perf_counter(), snapshot.step
        self._next = math.inf if self._every == 0 else snapshot.step + 2
        self.live, sent = begin_mirroring(member, snapshot.step, on_trial=self._every is None)
        return self._said(snapshot) | {"moved": sent, "seconds": time.perf_counter() - began}

    def _said(self, snapshot: Snapshot) -> dict[str, Any]:
        size = self.live.kept.bytes if self.live is not None else 0
        record = {"step": snapshot.step, "every": 0, "bytes": size}
        return record if self._trial.share is None else record | {"share": self._trial.share}

    def _end_live(self) -> None:
        if self.live is not None:
            self.live.close()
            self.live = None

    def _copied(self, member: Member, snapshot: Snapshot) -> tuple[Copy, int]:
        opening, group = member.opening, everyone(member)
        assert opening is not None
        layout, rank = member.state.layout, opening.context.rank
        has_place = isinstance(member, Session)
        filled = list(member.state.shards()) if has_place else []
        updated = updated_by(layout, rank if has_place else None)
        slots = slots_now(layout, updated, [shard for shard, _ in filled], group)
        migration = self._migration(layout, slots)
        held = {shard.name: data for shard, data in filled}
        arrived = gather(
            migration, held, rank=rank, group=group, device=opening.device, home=lambda name: torch.device("cpu")
        )
        data = {name: tensor.detach().to("cpu", copy=True) for name, tensor in held.items()}
        for name, tensor in arrived.items():
            data[name] = torch.cat([data[name], tensor]) if name in data else tensor
        optimizer, loss_scale = everyones(group, *member.state.scalars())
        copy = Copy(
            member.plan, rank, snapshot.step, tuple(shard for shard, _ in filled), data,
            checksums(data.values()), snapshot.to_json(), optimizer, loss_scale,
        )  # fmt: skip
        return copy, migration.bytes_sent

    def _migration(self, layout: StateLayout, slots: SlotsOf) -> Migration:
        """What goes from every rank to the next; remembered where the optimizer keeps what was foreseen."""
        foreseen = slots == layout.expected_slots
        if foreseen and layout.plan in self._migrations:
            return self._migrations[layout.plan]
        before = layout.all_state(slots)
        found = plan_migration(layout, layout, before, mirrored(before))
        if foreseen:
            self._migrations = {layout.plan: found}
        return found

    def let_go_of_damaged(self) -> list[str]:
        """What is said of copies that are not what they were."""
        damaged = [copy for copy in self.copies if not copy.is_sound]
        self.copies = [copy for copy in self.copies if copy not in damaged]
        return [f"the copy of step {copy.step} in the memory of rank {copy.rank} was damaged" for copy in damaged]

    def told(self) -> list[list[Any]]:
        """What others need to know of copies besides tensors, the newest first."""
        return [
            [copy.step, copy.plan.full_text, copy.snapshot, copy.optimizer, copy.loss_scale]
            for copy in reversed(self.copies)
        ]

    def of(self, step: int, plan: str) -> Copy | None:
        return next((copy for copy in reversed(self.copies) if (copy.step, copy.plan.full_text) == (step, plan)), None)


def seldom_enough(seconds: float, trained: float, steps: int) -> int:
    """After how many steps copies that take so long cost no more than half a percent: checkpoints cost something, too.
    trained: seconds of all steps."""
    return max(1, math.ceil(seconds * steps / (MOST_SHARE / 2 * trained))) if trained else 1


def _why_none(member: Member) -> str | None:
    """Why there is nothing to copy under a plan, if so. All ranks come to the same answer."""
    assert member.opening is not None
    if is_muon(member.opening.config, member.opening.optimizer_class) or _updates_matrices(member):
        return "the optimizer updates matrices whole: what is lost comes from the newest checkpoint"
    if member.plan.world == 1:
        return f"under plan {member.plan.shown} there is no other rank"
    if any(lone_parameters(member.state.layout).values()):
        return None
    return f"under plan {member.plan.shown} at least two ranks hold every part of the state"


def _updates_matrices(member: Member) -> bool:
    """Whether an optimizer of the user's own does, which a rank without a place cannot tell."""
    if member.state.layout.facts.slots is not None:
        return False
    does = isinstance(member, Session) and isinstance(member.state.optimizer.inner, MatrixWise)
    return any(everyone(member).texts("yes" if does else ""))


def layout_of_copies(layout: StateLayout, ranks: Iterable[int], slots: SlotsOf) -> Layout:
    """What ranks of a plan have in their copies."""
    whole = layout.all_state(slots)
    kept = mirrored(whole)
    return {rank: beside(whole.get(rank, ()), kept.get(rank, ())) for rank in ranks}
