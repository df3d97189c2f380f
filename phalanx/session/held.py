"""What a rank still has of a run when its links broke, and which step that is the state after.

A step counts once NORM has come to one rank: it is a sum over all of them, so every rank had reduced its gradients by
then and can end the step alone, with the numbers of the one that knows them. Ranks differ by one such step at most.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from phalanx.adapt.holdings import Moving, Part, Place
from phalanx.adapt.migrate import updated_by
from phalanx.engine.mirroring import Mirroring
from phalanx.engine.step import Outcome, Step
from phalanx.errors import LinkError
from phalanx.params.layout_of import StateLayout
from phalanx.params.matrix_wise import MatrixWise
from phalanx.params.mirrored import Mirrored
from phalanx.params.rank_state import Filled, State
from phalanx.plan import fields
from phalanx.plan.plan import Plan
from phalanx.session.session import Session
from phalanx.session.spare import Member


@dataclass
class Held:
    """The state of a rank of a plan after so many steps. stepping: the step after those, interrupted when this rank had
    reduced its gradients. mirroring: of what another held alone; mirrored: the same,
    once it is known to be of that step and undamaged. outcome, sums: of the last step, where it was ended here."""

    plan: Plan
    rank: int
    step: int
    state: State | Moving
    stepping: Step | None = None
    mirroring: Mirroring | None = None
    mirrored: Mirrored | None = None
    outcome: Outcome | None = None
    sums: list[float] | None = None

    @property
    def layouts(self) -> list[StateLayout]:
        """Of the parts."""
        return [self.state.layout, *([self.state.to] if isinstance(self.state, Moving) else [])]

    @property
    def parts(self) -> list[Part]:
        """What this rank holds: all that the plan gives it, unless the plan was changing."""
        return self.state.parts if isinstance(self.state, Moving) else [Part(self.plan, self.rank)]

    def filled(self) -> list[list[Filled]]:
        """The data of each part."""
        return self.state.filled() if isinstance(self.state, Moving) else [list(self.state.shards())]

    @property
    def updated(self) -> list[str]:
        """The parameters of which the optimizer has state here, once there is any."""
        state = self.state
        return state.updated if isinstance(state, Moving) else updated_by(state.layout, self.rank)

    def complete(self, sums: Sequence[float]) -> bool:
        """Ends the step that was interrupted; whether it could."""
        assert self.stepping is not None
        stepping, self.stepping = self.stepping, None
        try:
            self.outcome = stepping.complete(sums)
        except LinkError:  # an optimizer that needs other ranks for its update
            return False
        self.step, self.sums = self.step + 1, list(sums)
        return True

    def take_mirror(self) -> list[str]:
        """What this rank mirrors can be used where it is of the same step and undamaged; what is said of it if not."""
        self.mirrored = None
        if self.mirroring is None:
            return []
        self.mirroring.settle()
        kept = self.mirroring.kept
        if not (self.mirroring.is_sound and kept.is_sound):
            return [f"the mirror of rank {kept.rank} in the memory of rank {self.rank} was damaged"]
        self.mirrored = kept if self.mirroring.step == self.step else None
        return []


PartTold = tuple[str, int, list[str] | None]  # a plan, a rank of it, the parameters of which its state is held, or all


@dataclass(frozen=True)
class Word:
    """What a rank says of itself when a generation begins. parts: of the state that it holds, after `step` steps.
    completes: it can end the step after those, once it knows `sums` of a rank that did. reported: the newest step that
    it has told of. saving: a checkpoint was on its way. copies: step, plan and rank of those that it has; damaged: what
    is said of others."""

    survived: bool
    parts: list[PartTold] = field(default_factory=list[PartTold])
    step: int = -1
    completes: bool = False
    sums: list[float] | None = None
    reported: int = -1
    saving: bool = False
    copies: list[tuple[int, str, int]] = field(default_factory=list[tuple[int, str, int]])
    damaged: list[str] = field(default_factory=list[str])

    @property
    def plan(self) -> str:
        """Of the first of its parts; empty if it holds none."""
        return self.parts[0][0] if self.parts else ""

    def place(self, mirror: PartTold | None) -> Place:
        """mirror: what it says that it mirrors."""
        return Place(tuple(_part(*told) for told in self.parts), None if mirror is None else _part(*mirror))


def hold(member: Member, at: int) -> Held | None:
    """What is left of a member whose links broke. at: the step that it was at."""
    links = member.connected.links if isinstance(member, Session) else member.links
    links.abort()
    if member.left is not None:
        return _hold_changing(member, member.left, at)
    if not isinstance(member, Session) or not hasattr(member, "state"):
        return None  # nothing was here, or state that lies with owners of whole matrices was moving
    state = member.state
    if isinstance(state.optimizer.inner, MatrixWise):
        return None
    stepping, run = member.step, member.step.run
    held = Held(member.plan, member.compiled.rank, at - 1 if run is None else stepping.run_number - 1, state)
    held.mirroring = stepping.mirroring
    if run is not None and run.reduced:
        held.stepping = stepping
        if run.sums is not None and not held.complete(run.sums.tolist()):
            return None
    state.abandon()
    return held


def _hold_changing(member: Member, left: State | Moving, at: int) -> Held | None:
    """In the middle of a change of plan: before it, in it, or after it, for some parameters or all."""
    assert member.opening is not None
    if isinstance(left, State) and isinstance(left.optimizer.inner, MatrixWise):
        return None
    held = Held(left.layout.plan, member.opening.context.rank, at - 1, left)
    held.mirroring = left.mirroring if isinstance(left, Moving) else None
    left.abandon()
    return held if held.parts else None


def part_told(part: Part) -> PartTold:
    return part.plan.full_text, part.rank, None if part.names is None else sorted(part.names)


def _part(plan: str, rank: int, names: list[str] | None) -> Part:
    """As it was told."""
    return Part(Plan(**fields.read(plan)), rank, None if names is None else frozenset(names))


def newest_step(words: Sequence[Word]) -> int:
    """The last step that counts; -1 if no rank holds state."""
    return max((word.step for word in words if word.parts), default=-1)


def sums_of(words: Sequence[Word], step: int) -> list[float] | None:
    """What NORM found in a step, as a rank knows it that ended it."""
    return next((word.sums for word in words if word.parts and word.step == step and word.sums is not None), None)
