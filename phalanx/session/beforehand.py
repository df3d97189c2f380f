"""What another plan needs besides state, made before anything is touched: functions and programs on every rank, and the
groups between them. Whatever fails here, on whatever rank, is a refusal with its reason on all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from phalanx.adapt.migrate import ChangeRefused, agree, refusing
from phalanx.comm.links import Channel, Group, Links, OthersStopped
from phalanx.engine.compiled import Compiled
from phalanx.engine.layout import ProcessGroups
from phalanx.errors import LinkError, PhalanxError
from phalanx.params.layout_of import StateLayout
from phalanx.params.matrix_wise import Holders, MatrixWise
from phalanx.params.optimizer import make_optimizer
from phalanx.params.parameters import Weight
from phalanx.plan.plan import Plan
from phalanx.session.session import Look, Opening, Session
from phalanx.session.spare import Member


def prepared(opening: Opening, plan: Plan, group: Group, look: Look | None) -> tuple[Compiled | None, StateLayout]:
    """Functions and programs of a plan on all ranks of a group; raises `ChangeRefused` on all of them where one cannot
    have it."""
    compiled, layout, problem = locally_prepared(opening, plan, look)
    agree(group, problem)
    assert layout is not None
    return compiled, layout


def locally_prepared(
    opening: Opening, plan: Plan, look: Look | None, was: Member | None = None
) -> tuple[Compiled | None, StateLayout | None, PhalanxError | None]:
    """Functions and programs of the new plan, and that it fits: all that can be known before anything is touched; or
    what is wrong with it. was: whose state is to move."""
    compiled: Compiled | None = None
    layout: StateLayout | None = None
    try:
        with refusing(f"plan {plan.shown} cannot be made ready"):
            if opening.has_place(plan):
                compiled = opening.remembered(plan)
                layout = compiled.formation.state
                _require_optimizer(opening, layout, was)
                if look is not None:
                    look(compiled, opening.compile)
            else:
                layout = opening.layout(plan)
    except LinkError:
        raise
    except PhalanxError as error:
        return compiled, layout, error
    return compiled, layout, None


def _require_optimizer(opening: Opening, layout: StateLayout, was: Member | None) -> None:
    """Refuses an optimizer that cannot update what the plan would give this rank, and one whose state lies, or would
    lie, with the owners of matrices that a plan splits."""
    weights: dict[str, Weight] = {}
    for kept in layout.kept(opening.context.rank):
        if kept.facts.trained:
            empty = torch.empty([0] * len(kept.facts.shape), device=opening.device)
            weights[kept.facts.name] = Weight(kept.piece, empty, empty, trained=True)
    holders = Holders(layout, opening.context.rank, opening.device)
    made = make_optimizer(weights, opening.config, opening.optimizer_class, opening.groups, holders)
    if was is None:
        return
    now = was.state.optimizer.inner if isinstance(was, Session) else None
    for plan, optimizer in ((layout.plan, made), (was.plan, now)):
        if isinstance(optimizer, MatrixWise) and optimizer.ranks:
            raise ChangeRefused(
                f"plan {plan.shown} splits matrices that the optimizer updates whole: what their owners keep of it "
                "cannot move while a run trains",
                "choose plans with zero=0 and tp=1; or save, and go on from the checkpoint under the new plan",
            )


@dataclass
class Connected:
    """How a rank is connected under a plan. groups: None where it has no place. told: see `Opening.told`."""

    groups: ProcessGroups | None
    told: Group | None

    def ends(self) -> Iterator[Group | Channel]:
        yield from self.groups.ends() if self.groups is not None else ()
        yield from (self.told,) if self.told is not None else ()

    def over(self, links: Links, beside: Links) -> Connected:
        """The same over links that have what was made beside them from now on."""
        links.take(beside)
        if self.groups is not None:
            self.groups.links = links
        return self


def connect_beside(opening: Opening, plan: Plan, compiled: Compiled | None, beside: Links) -> Connected:
    """Over links that are made beside others. All ranks of a job at once; where one fails, the rest hear of it."""
    try:
        return _connect(opening, plan, compiled, beside)
    except BaseException:
        beside.fail()
        raise


def connected_on_all(opening: Opening, plan: Plan, compiled: Compiled | None, links: Links, group: Group) -> Connected:
    """How all ranks are connected under a plan. group: of all ranks, which they have.

    Raises `ChangeRefused` on all of them where one cannot connect while they still reach each other over what they
    have. Not so over NCCL, of which nobody knows what a communicator leaves on a device when it does not come to be:
    there that is a `LinkError`, as any other link that fails.
    """
    if opening.device.type == "cuda" or opening.context.world == 1:
        return _connect(opening, plan, compiled, links)
    beside, problem, connected = links.beside(f"change{links.next_number()}"), None, None
    try:
        with refusing(f"the groups of plan {plan.shown} cannot be made"):
            connected = connect_beside(opening, plan, compiled, beside)
    except OthersStopped:  # who does not connect says why
        pass
    except LinkError as error:
        problem = ChangeRefused(f"the groups of plan {plan.shown} cannot be made: {error.message}", error.hint)
    except PhalanxError as error:
        problem = error
    try:
        agree(group, problem)
    except PhalanxError:
        beside.leave()
        raise
    assert connected is not None, "a rank was stopped, and none has failed"
    return connected.over(links, beside)


def _connect(opening: Opening, plan: Plan, compiled: Compiled | None, links: Links) -> Connected:
    groups = ProcessGroups(compiled.formation, links) if compiled is not None else None
    return Connected(groups, opening.told(links, plan))
