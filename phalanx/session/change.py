"""Another plan for a session that runs: everything that can be refused first, then new connections, then the state.

All ranks of the job call `change` between the same two steps. Until the state moves nothing has changed; while it moves
it can be moved back; afterwards the session is one of the new plan, as if it had been opened with it.
"""

from __future__ import annotations

import contextlib
import gc
import json
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from phalanx.adapt.migrate import (
    Arrived,
    ChangeRefused,
    Home,
    MovedBack,
    agree,
    migrate,
    problem_text,
    require_none,
    slots_told,
    slots_word,
)
from phalanx.adapt.portions import Migration, gathered, parameter_of, plan_migration
from phalanx.comm.links import Channel, Group, Links
from phalanx.config import RunConfig
from phalanx.engine.compiled import Compiled
from phalanx.engine.layout import ProcessGroups
from phalanx.errors import LinkError, PhalanxError
from phalanx.params.buckets import Read
from phalanx.params.flat import Piece
from phalanx.params.layout_of import SlotsOf, StateLayout
from phalanx.params.matrix_wise import Holders, MatrixWise
from phalanx.params.optimizer import make_optimizer
from phalanx.params.parameters import Weight
from phalanx.params.rank_state import State
from phalanx.plan.plan import Plan
from phalanx.records import read_record
from phalanx.session.session import Look, Opening, Session
from phalanx.session.spare import Spare

Member = Session | Spare  # what a rank is in a job


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


@dataclass
class Connected:
    """How a rank is connected under a plan. groups: None where it has no place. told: see `Opening.told`."""

    groups: ProcessGroups | None
    told: Group | None

    def ends(self) -> Iterator[Group | Channel]:
        yield from self.groups.ends() if self.groups is not None else ()
        yield from (self.told,) if self.told is not None else ()


def connect(opening: Opening, plan: Plan, compiled: Compiled | None, links: Links) -> Connected:
    """All ranks of a job at once."""
    groups = ProcessGroups(compiled.formation, links) if compiled is not None else None
    return Connected(groups, opening.told(links, plan))


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

    Raises `ChangeRefused` on all ranks where one of them cannot: then all is as it was, and `member` goes on.
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
        words = _said(group, _word(member, compiled, problem, opening, ahead is not None and ahead.has_groups))
    assert layout is not None
    with done.timed("connect"):
        if ahead is not None and all(word.connected for word in words):
            connected = ahead.take_groups()
        else:
            connected = connect(opening, plan, compiled, links)
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
    slots = slots_word(member.state.layout, rank, member.state.kept_slots())
    return _Word("", connected, _stays(member, compiled), slots, *member.state.scalars())


def _said(group: Group, word: _Word) -> list[_Word]:
    """What all ranks say; raises on all of them where one has a problem."""
    words = [read_record(_Word, text) for text in group.texts(json.dumps(asdict(word)))]
    require_none(group, [own.problem for own in words])
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


def prepared(opening: Opening, plan: Plan, group: Group, look: Look | None) -> tuple[Compiled | None, StateLayout]:
    """Functions and programs of a plan on all ranks of a group; raises on all of them where one refuses it."""
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


def _stays(member: Member, compiled: Compiled | None) -> bool:
    """Whether all state of this rank lies where it would lie."""
    if isinstance(member, Spare) or compiled is None:
        return isinstance(member, Spare) and compiled is None
    was = member.compiled
    same_homes = was.hosted() == compiled.hosted() and was.fetched() == compiled.fetched()
    return same_homes and same_place(member.state.layout, compiled.rank, compiled.formation.state, compiled.rank)


def same_place(old: StateLayout, was: int, new: StateLayout, now: int) -> bool:
    """Whether a rank keeps the same in the same way under two plans. was, now: its number."""
    return (
        old.facts == new.facts
        and old.buckets(was) == new.buckets(now)
        and old.sharding(was) == new.sharding(now)
        and list(old.kept(was)) == list(new.kept(now))
        and old.plan.steps_on_host == new.plan.steps_on_host
    )


def _moved(
    member: Member, compiled: Compiled | None, layout: StateLayout, connected: ProcessGroups | None, group: Group,
    opening: Opening, done: Change, words: Sequence[_Word],
) -> State | None:  # fmt: skip
    """The state of this rank under the new plan; the old one is gone."""
    rank, was, old = opening.context.rank, member if isinstance(member, Session) else None, member.state.layout
    optimizer, loss_scale = _merged([word.optimizer for word in words]), words[0].loss_scale
    slots = slots_told(old, [word.slots for word in words])
    held = {shard.name: data for shard, data in was.give_up_state()} if was is not None else {}
    migration = migration_of(opening, old, layout, slots)
    done.bytes = migration.bytes_sent + gathered(layout).total()
    if opening.device.type == "cuda":
        gc.collect()  # what holds a session together refers to each other

    try:
        home = homes(opening, compiled)
        arrived = migrate(migration, held, rank=rank, group=group, device=opening.device, home=home)
    except MovedBack as back:
        if was is not None:
            was.put_back(made(opening, was.compiled, back.state, optimizer, loss_scale, was.connected.gather))
        raise back.refused from None
    if compiled is None or connected is None:
        return None
    return made(opening, compiled, arrived, optimizer, loss_scale, connected.gather)


def homes(opening: Opening, compiled: Compiled | None) -> Home:
    """Where the tensors of a rank's state are to lie."""
    hosted = _named(compiled, compiled.hosted()) if compiled is not None else set[str]()
    fetched = _named(compiled, compiled.fetched()) if compiled is not None else set[str]()

    def home(name: str) -> torch.device:
        is_hosted = parameter_of(name) in (fetched if name.startswith("model/") else hosted)
        return torch.device("cpu") if is_hosted else opening.device

    return home


def _named(compiled: Compiled, buckets: Iterable[int]) -> set[str]:
    """The parameters of some buckets."""
    facts = compiled.formation.facts
    return {each.name for bucket in buckets for each in facts.buckets.get(bucket, ())}


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


def made(
    opening: Opening, compiled: Compiled, arrived: Arrived, optimizer: dict[str, Any],
    loss_scale: dict[str, float] | None, zero: Group,
) -> State:  # fmt: skip
    def read(name: str, is_master: bool, piece: Piece) -> Tensor:
        return piece.read(arrived, f"{'master' if is_master else 'model'}/{name}")

    state = opening.state(compiled, read, only_shards=True)
    state.parameters.collect(zero)
    state.restore(arrived, optimizer, loss_scale)
    return state
