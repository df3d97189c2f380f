"""State from the layout of one plan to that of another, straight between the ranks of a running job.

Portion by portion: all ranks make room, exchange, compare checksums, agree that all is well, and only then let go of
what the portion was made of, so that no rank ever holds much more than the larger of its two states. If something is
wrong on any rank, all of them move back what had already moved and have what they had. If a rank is lost meanwhile, the
others have every portion in the old layout or in the new one, or in both (`holdings.py`).
"""

from __future__ import annotations

import contextlib
import json
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from phalanx.adapt.exchange import Round, Staging, exchange
from phalanx.adapt.portions import Migration, Portion, parameter_of
from phalanx.comm.links import Group
from phalanx.errors import PhalanxError
from phalanx.params.layout_of import KeptSlot, SlotsOf, StateLayout
from phalanx.state.layout import Box, StateShard

Home = Callable[[str], torch.device]  # of a tensor by its name


class ChangeRefused(PhalanxError):
    """A change of plan that was not made: everything is as it was. traceback: of what failed on this rank, where that
    was nothing that we foresee."""

    def __init__(self, message: str, hint: str = "", traceback: str = "") -> None:
        super().__init__(message, hint)
        self.traceback = traceback
        if traceback:
            self.add_note(traceback)


class StateLost(PhalanxError):
    """A change of plan that could be neither made nor taken back: this rank has nothing to train on with."""

    def __init__(self, message: str) -> None:
        super().__init__(message, "go on from the newest checkpoint: --resume auto, in a loop of your own session.load")


@contextlib.contextmanager
def refusing(what: str) -> Iterator[None]:
    """Whatever fails within it is the reason of a refusal. Errors of ours say by themselves what is wrong."""
    try:
        yield
    except PhalanxError:
        raise
    except Exception as error:
        where = "the traceback is in that rank's run log; in a loop of your own it is shown with this error"
        raise ChangeRefused(f"{what}: {first_line(error)}", where, traceback.format_exc()) from None


def first_line(error: BaseException) -> str:
    """Of what kind it is, and the beginning of what it says."""
    lines = str(error).strip().splitlines()
    return ": ".join([type(error).__name__, *lines[:1]])


def agree(group: Group, problem: PhalanxError | str | None) -> None:
    """Returns on all ranks, or, where one of them has a problem, raises on all of them."""
    require_none(group, group.texts(problem_text(problem)), problem)


def problem_text(problem: PhalanxError | str | None) -> str:
    """Nothing where there is none."""
    if isinstance(problem, PhalanxError):
        return json.dumps([problem.message, problem.hint])
    return json.dumps([problem, ""]) if problem else ""


def require_none(group: Group, said: Sequence[str], own: PhalanxError | str | None) -> None:
    """said: the problems of all ranks as `problem_text` writes them. own: this rank's."""
    found = [(rank, *json.loads(text)) for rank, text in zip(group.ranks, said, strict=True) if text]
    if found:
        rank, message, hint = found[0]
        where = "" if len({message for _, message, _ in found}) == 1 and len(found) == len(said) else f"rank {rank}: "
        raise ChangeRefused(f"{where}{message}", hint, own.traceback if isinstance(own, ChangeRefused) else "")


class Arrived:
    """State of a rank as it came, by its names in a checkpoint; whoever reads a tensor takes it out."""

    def __init__(self, shards: Iterable[StateShard], data: dict[str, Tensor]) -> None:
        self._shards, self._data = {shard.name: shard for shard in shards}, data

    def names(self) -> Sequence[str]:
        return list(self._data)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shards[name].shape

    def read(self, name: str) -> Tensor:
        return self.read_flat(name, self._shards[name].boxes).view(self.shape(name))

    def read_flat(self, name: str, boxes: Sequence[Box]) -> Tensor:
        assert tuple(boxes) == self._shards[name].boxes, f"of {name} other boxes came than are wanted"
        return self._data.pop(name)


def slots_now(layout: StateLayout, updated: Iterable[str], held: Iterable[StateShard], group: Group) -> SlotsOf:
    """What the optimizer keeps by now of each parameter, on whatever rank. Before a first update that is nothing; and
    some optimizers are not known well enough to be foreseen. Only then do ranks tell each other. updated: the
    parameters of which it has state here, once there is any."""
    shapes = {each.name: each.shape for each in layout.facts.parameters}
    found: list[tuple[str, KeptSlot]] = []
    for shard in held:
        kind, slot, *_ = shard.name.split("/", 2)
        if kind == "optimizer":
            name = parameter_of(shard.name)
            found.append((name, (slot, shard.dtype, None if shard.shape == shapes[name] else shard.shape)))
    return slots_told(layout, group.texts(slots_word(layout, updated, found)))


def updated_by(layout: StateLayout, rank: int | None) -> list[str]:
    """The parameters that a rank updates; none where it has no place."""
    return [kept.facts.name for kept in layout.updated(rank)] if rank is not None else []


def slots_word(layout: StateLayout, updated: Iterable[str], held: Iterable[tuple[str, KeptSlot]]) -> str:
    """What this rank says of its optimizer's slots: nothing where it keeps what is foreseen."""
    found: dict[str, list[KeptSlot]] = {name: [] for name in updated}
    for name, slot in held:
        found[name].append(slot)
    foreseen = layout.facts.slots is not None
    as_foreseen = foreseen and all(sorted(own, key=str) == _expected(layout, name) for name, own in found.items())
    return "" if as_foreseen else json.dumps(found)


def slots_told(layout: StateLayout, texts: Sequence[str]) -> SlotsOf:
    """texts: what all ranks said."""
    if not any(texts):
        return layout.expected_slots
    told: dict[str, tuple[KeptSlot, ...]] = {}
    for text in filter(None, texts):
        for name, own in json.loads(text).items():
            told[name] = tuple((slot, dtype, None if shape is None else tuple(shape)) for slot, dtype, shape in own)
    return lambda name: told[name] if name in told else layout.expected_slots(name)


def _expected(layout: StateLayout, name: str) -> list[KeptSlot]:
    return sorted(layout.expected_slots(name), key=str)


def migrate(
    migration: Migration, old: dict[str, Tensor], new: dict[str, Tensor], *, rank: int, group: Group,
    device: torch.device, home: Home,
) -> None:  # fmt: skip
    """Takes what this rank has out of `old` and puts what it gets into `new`, portion by portion: at any time what
    stands in either is all there, and what `old` has lost all ranks have. group: all ranks of the job, which all call
    this. home: in the new layout.

    Raises `ChangeRefused` where the change was not made: then all is in `old` again. Raises `StateLost` where that
    failed, too.
    """
    homes = {name: data.device for name, data in old.items()}
    stream = _Stream(rank, group, device)
    try:
        stream.run(migration, old, new, home)
    except ChangeRefused as refused:
        back = migration.back(stream.dropped)
        try:
            _Stream(rank, group, device).run(back, new, old, homes.__getitem__)
        except ChangeRefused as again:
            raise StateLost(
                f"a change of plan failed halfway and could not be taken back: {refused.message}; then {again.message}"
            ) from None
        raise


def gather(
    migration: Migration, held: dict[str, Tensor], *, rank: int, group: Group, device: torch.device, home: Home
) -> dict[str, Tensor]:
    """What this rank gets, with everything that it has still there afterwards, whatever becomes of the others
    meanwhile."""
    found: dict[str, Tensor] = {}
    _Stream(rank, group, device).run(migration, dict(held), found, home)
    return found


class _Stream:
    """`dropped` are the portions whose old state is gone."""

    def __init__(self, rank: int, group: Group, device: torch.device) -> None:
        self._rank, self._group, self._staging = rank, group, Staging(device)
        self.dropped: list[Portion] = []

    def run(self, migration: Migration, held: dict[str, Tensor], arrived: dict[str, Tensor], home: Home) -> None:
        """Out of `held` goes a portion when all ranks have it; to `arrived` it comes when it is all here, and sound."""
        old, new = (
            {shard.name: shard for shard in layout.get(self._rank, ())} for layout in (migration.old, migration.new)
        )
        problem: str | None = None
        before: Portion | None = None
        rounds = iter(rounds_of(migration, self._rank, self._group.ranks))
        for portion in (*migration.portions, None):
            room: dict[str, Tensor] = {}
            own = next(rounds, [])
            if portion is not None and problem is None:
                try:
                    room = self._room(portion, old, new, held, home)
                    self._staging.make_room(own)
                except RuntimeError as error:
                    problem = f"no room for {portion.names[0]} and what goes with it: {str(error).splitlines()[0]}"
            agree(self._group, problem)  # also that what came before is sound
            if before is not None:
                self.dropped.append(before)
                for name in before.names:
                    held.pop(name, None)
            if portion is None:
                break
            problem, before = self._move(portion, own, held, room), portion
            if problem is None:
                arrived |= room

    def _room(
        self, portion: Portion, old: dict[str, StateShard], new: dict[str, StateShard], held: dict[str, Tensor],
        home: Home,
    ) -> dict[str, Tensor]:  # fmt: skip
        """Memory for what comes. What stays as it is needs none, unless it is a part of a buffer of which another part
        goes: it would keep all of it."""
        stays = {
            name for name in portion.names
            if name in old and name in new and old[name].boxes == new[name].boxes and held[name].device == home(name)
        }  # fmt: skip
        left = {_storage(held[name]) for name in portion.names if name in old and name not in stays}
        found: dict[str, Tensor] = {}
        for name in portion.names:
            if name in stays and _storage(held[name]) not in left:
                found[name] = held[name]
            elif name in new:
                found[name] = torch.empty(new[name].numel, dtype=getattr(torch, new[name].dtype), device=home(name))
        return found

    def _move(
        self, portion: Portion, rounds: Iterable[Round], held: dict[str, Tensor], room: dict[str, Tensor]
    ) -> str | None:
        for move in portion.local:
            if move.destination == self._rank and room[move.name] is not held[move.name]:
                source = move.taken_from.view(held[move.name], move.box)
                move.put_to.view(room[move.name], move.box).copy_(source)
        problems: list[str] = []
        for each in rounds:
            problems += exchange(each, held, room, self._group, self._staging)
        return "; ".join(problems[:3]) or None


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def rounds_of(migration: Migration, rank: int, ranks: Sequence[int]) -> list[list[Round]]:
    """Of every portion, as one rank of a group sees them; remembered with the migration."""
    key = (rank, tuple(ranks))
    if key not in migration.seen:
        migration.seen[key] = [[Round.of(own, rank, ranks) for own in portion.rounds] for portion in migration.portions]
    return migration.seen[key]
