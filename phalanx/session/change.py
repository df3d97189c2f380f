"""Another plan for a session that runs: everything that can be refused first, then new connections, then the state.

All ranks of the job call `change` between the same two steps. Until the state moves nothing has changed; while it moves
it can be moved back; afterwards the session is one of the new plan, as if it had been opened with it.
"""

from __future__ import annotations

import contextlib
import gc
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

from torch import Tensor

from phalanx.adapt.holdings import Moving
from phalanx.adapt.migrate import (
    Arrived,
    ChangeRefused,
    agree,
    migrate,
    problem_text,
    refusing,
    require_none,
    slots_told,
    slots_word,
    updated_by,
)
from phalanx.adapt.portions import Migration, gathered, plan_migration
from phalanx.comm.links import Group, Links
from phalanx.config import RunConfig
from phalanx.engine.compiled import Compiled
from phalanx.engine.layout import ProcessGroups
from phalanx.errors import PhalanxError
from phalanx.params.buckets import Read
from phalanx.params.layout_of import SlotsOf, StateLayout
from phalanx.params.matrix_wise import MatrixWise
from phalanx.params.rank_state import State
from phalanx.plan.plan import Plan
from phalanx.records import read_record
from phalanx.session.beforehand import Connected, connected_on_all, locally_prepared
from phalanx.session.placing import homes, made, same_place
from phalanx.session.session import Look, Opening, Session
from phalanx.session.spare import Member, Spare
from phalanx.state.layout import Layout


@dataclass
class Change:
    """What a change was, and what it took. bytes: that went from rank to rank. ready: whether it was made ready for
    while the old plan trained. seconds: of its parts."""

    old: Plan
    new: Plan
    bytes: int = 0
    ready: bool = False
    seconds: dict[str, float] = field(default_factory=dict[str, float])

    @contextlib.contextmanager
    def timed(self, part: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self.seconds[part] = self.seconds.get(part, 0.0) + time.perf_counter() - begin


class MadeAhead(Protocol):
    """What was made for a change while the old plan trained (`ahead.py`)."""

    @property
    def has_groups(self) -> bool: ...

    def take_groups(self) -> Connected: ...


def change(
    member: Member, plan: Plan, config: RunConfig | None = None, look: Look | None = None,
    ahead: MadeAhead | None = None,
) -> tuple[Member, Change]:  # fmt: skip
    """What this rank is from now on. config: with another size of batches. look: as in `Session.open`. ahead: for this
    change, on all ranks or on none.

    Raises `ChangeRefused` on all ranks where one of them cannot: then all is as it was, and `member` goes on. Raises
    `StateLost` where a rank cannot use what has moved to it.
    """
    opening = member.opening
    assert opening is not None, "a session that was put together by hand stays as it is"
    opening = replace(opening, config=config or opening.config)
    done = Change(member.plan, plan, ready=ahead is not None)
    links, group = links_of(member), everyone(member)
    with done.timed("prepare"):
        compiled, layout, problem = locally_prepared(opening, plan, look, member)
        if isinstance(member, Session):
            member.step.engine.settle()
        has_groups = ahead is not None and ahead.has_groups
        words = _said(group, _word(member, compiled, problem, opening, has_groups), problem)
    assert layout is not None
    with done.timed("connect"):
        if ahead is not None and all(word.connected for word in words):
            connected = ahead.take_groups()
        else:
            connected = connected_on_all(opening, plan, compiled, links, group)
        groups = connected.groups
        if groups is not None:
            groups.owns_links = _owns(member)
    state = member.state if isinstance(member, Session) else None
    if all(word.stays for word in words):
        if state is not None:
            state.layout = layout
    else:
        with done.timed("move"):
            state = _moved(member, compiled, layout, groups, group, opening, done, words)
    with done.timed("connect"):
        links.drop_others([*connected.ends(), group])
    if compiled is None or groups is None or state is None:
        opening.context.slot.set_place("spare")
        return Spare(plan, opening, links), done
    if opening.context.world > 1:
        opening.context.slot.set_place(compiled.formation.place)
    return Session(compiled, groups, state, opening.watches, opening), done


@dataclass(frozen=True)
class _Word:
    """What a rank tells all others before a change, at once: a problem, or what they need to know of its state. slots:
    as `slots_word` writes them. optimizer, loss_scale: what there is of its state besides tensors. connected: whether
    it has the groups of the new plan by now."""

    problem: str
    connected: bool = False
    stays: bool = False
    slots: str = ""
    optimizer: dict[str, Any] = field(default_factory=dict[str, Any])
    loss_scale: dict[str, float] | None = None


def _word(
    member: Member, compiled: Compiled | None, problem: PhalanxError | None, opening: Opening, connected: bool
) -> _Word:
    if problem is not None:
        return _Word(problem_text(problem))
    rank = opening.context.rank if isinstance(member, Session) else None
    layout = member.state.layout
    slots = slots_word(layout, updated_by(layout, rank), member.state.kept_slots())
    return _Word("", connected, _stays(member, compiled), slots, *member.state.scalars())


def _said(group: Group, word: _Word, problem: PhalanxError | None) -> list[_Word]:
    """What all ranks say; raises on all of them where one has a problem."""
    words = [read_record(_Word, text) for text in group.texts(json.dumps(asdict(word)))]
    require_none(group, [own.problem for own in words], problem)
    return words


def everyone(member: Member) -> Group:
    """All ranks of the job, those without a place included."""
    assert member.opening is not None
    return links_of(member).group(tuple(range(member.opening.context.world)), "world")


def links_of(member: Member) -> Links:
    return member.links if isinstance(member, Spare) else member.connected.links


def open_member(opening: Opening, plan: Plan, read: Read, look: Look | None = None) -> Member:
    """A rank's part in a plan that may leave some out."""
    if opening.has_place(plan):
        return Session.of(opening, plan, read, look)
    opening.context.slot.set_place("spare")
    return Spare(plan, opening, Links(opening.context, timeout=opening.config.timeout))


def _owns(member: Member) -> bool:
    return isinstance(member, Spare) or member.connected.owns_links


def _stays(member: Member, compiled: Compiled | None) -> bool:
    """Whether all state of this rank lies where it would lie."""
    if isinstance(member, Spare) or compiled is None:
        return isinstance(member, Spare) and compiled is None
    was = member.compiled
    same_homes = was.hosted() == compiled.hosted() and was.fetched() == compiled.fetched()
    return same_homes and same_place(member.state.layout, compiled.rank, compiled.formation.state, compiled.rank)


def _moved(
    member: Member, compiled: Compiled | None, layout: StateLayout, connected: ProcessGroups | None, group: Group,
    opening: Opening, done: Change, words: Sequence[_Word],
) -> State | None:  # fmt: skip
    """The state of this rank under the new plan; the old one is gone. Where links break, `left` of the member is what
    there is of both."""
    rank, was, old = opening.context.rank, member if isinstance(member, Session) else None, member.state.layout
    optimizer, loss_scale = _merged([word.optimizer for word in words]), words[0].loss_scale
    slots = slots_told(old, [word.slots for word in words])
    migration = _planned(opening, old, layout, slots, group)
    mirroring, is_by_elements = was.step.mirroring if was is not None else None, _is_by_elements(member)
    held = {shard.name: data for shard, data in was.give_up_state()} if was is not None else {}
    moving = Moving(rank, old, layout, migration, held, optimizer, loss_scale, mirroring)
    member.left = moving if is_by_elements else None
    done.bytes = migration.bytes_sent + gathered(layout).total()
    if opening.device.type == "cuda":
        gc.collect()  # what holds a session together refers to each other

    def finished(compiled: Compiled, side: Layout, data: dict[str, Tensor], zero: Group) -> State:
        member.left = made(opening, compiled, Arrived(side.get(rank, ()), data), optimizer, loss_scale)
        member.left.parameters.collect(zero)
        return member.left

    try:
        home = homes(opening, compiled)
        migrate(migration, moving.old, moving.new, rank=rank, group=group, device=opening.device, home=home)
    except ChangeRefused:
        if was is not None:
            was.put_back(finished(was.compiled, migration.old, moving.old, was.connected.gather))
        member.left = None
        raise
    if compiled is None or connected is None:
        return None
    return finished(compiled, migration.new, moving.new, connected.gather)


def _is_by_elements(member: Member) -> bool:
    """Whether what a rank has of the state is all in what plans lay out: not so where matrices are updated whole."""
    if isinstance(member, Session):
        return not isinstance(member.state.optimizer.inner, MatrixWise)
    return member.state.layout.facts.slots is not None


def _planned(opening: Opening, old: StateLayout, new: StateLayout, slots: SlotsOf, group: Group) -> Migration:
    """The moves of state, on all ranks; raises `ChangeRefused` on all of them where one does not find them."""
    migration: Migration | None = None
    problem: PhalanxError | None = None
    try:
        with refusing(f"how state moves to plan {new.plan.shown} cannot be found"):
            migration = migration_of(opening, old, new, slots)
    except PhalanxError as error:
        problem = error
    agree(group, problem)
    assert migration is not None
    return migration


def everyones(
    group: Group, optimizer: dict[str, Any], loss_scale: dict[str, float] | None
) -> tuple[dict[str, Any], dict[str, float] | None]:
    """What the ranks' optimizers keep besides tensors, together; rank 0 always has a place."""
    said = [json.loads(text) for text in group.texts(json.dumps([optimizer, loss_scale]))]
    return _merged([own for own, _ in said]), said[0][1]


def _merged(said: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Where ranks say different things, the first is right."""
    merged: dict[str, Any] = {}
    for own in reversed(said):
        merged |= own
    return merged


def migration_of(opening: Opening, old: StateLayout, new: StateLayout, slots: SlotsOf) -> Migration:
    """Remembered where the optimizer keeps what was foreseen."""
    pair = (old.plan, new.plan)
    foreseen = slots == old.expected_slots
    if foreseen and pair in opening.migrations:
        return opening.migrations[pair]
    found = plan_migration(old, new, old.all_state(slots), new.all_state(slots))
    if foreseen:
        opening.migrations[pair] = found
    return found
