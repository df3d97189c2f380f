"""A change of layout in portions that can be carried out one after the other: pure, and the same on every rank.

A portion is all state of the parameters of a bucket, or of a few. It is closed: no bucket of either plan has a
parameter in two portions, so that once a portion has moved, the memory of its old buckets is free. Its buckets are, as
far as there are such, of different ranks that give or get most of each, so that all links are in use. Its moves between
ranks go in rounds, none of which needs much memory besides.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from phalanx.params.layout_of import StateLayout
from phalanx.params.state_facts import ParameterFacts
from phalanx.plan.mesh import Mesh
from phalanx.program.compile import without_collection
from phalanx.state.layout import Box, Layout, StateShard
from phalanx.state.moves import Move, plan_moves

PORTION_BYTES = 2**26  # that a rank gives or gets in a portion, unless one bucket has more
ROUND_BYTES = 2**27  # that a rank sends or receives at once
BYTES = {"float64": 8, "int64": 8, "float32": 4, "int32": 4, "bfloat16": 2, "float16": 2, "int16": 2}


@dataclass(frozen=True)
class Portion:
    """names: of the tensors. local: moves within a rank. rounds: moves between ranks."""

    names: tuple[str, ...]
    local: tuple[Move, ...]
    rounds: tuple[tuple[Move, ...], ...]


@dataclass(frozen=True)
class Migration:
    """From one layout to another. seen: what was made of it, by whoever carries it out."""

    old: Layout
    new: Layout
    portions: tuple[Portion, ...]
    seen: dict[Any, Any] = field(default_factory=dict[Any, Any], compare=False)

    @cached_property
    def bytes_sent(self) -> int:
        """By all ranks to others."""
        moves = (move for portion in self.portions for own in portion.rounds for move in own)
        return sum(move_bytes(move) for move in moves)

    def back(self, portions: Sequence[Portion]) -> Migration:
        """The way back of these portions."""
        groups = [portion.names for portion in portions]
        old, new = (_only(layout, {name for names in groups for name in names}) for layout in (self.old, self.new))
        return Migration(new, old, tuple(_portion([own]) for own in _moving(new, old, groups)))


def plan_migration(old: StateLayout, new: StateLayout, before: Layout, after: Layout) -> Migration:
    """before, after: the state of all ranks under the two."""
    groups = _closed([old.facts.buckets, new.facts.buckets])
    of_parameter = {name: number for number, names in enumerate(groups) for name in names}
    found: list[dict[str, None]] = [{} for _ in groups]
    for shard in (shard for shards in after.values() for shard in shards):
        found[of_parameter[parameter_of(shard.name)]][shard.name] = None
    with without_collection():
        moving = _moving(before, after, [list(names) for names in found])
        return Migration(before, after, tuple(_portion(own) for own in _joined(moving)))


@dataclass(frozen=True)
class _Moving:
    """Tensors that move together. load: bytes that each rank gives, and that it gets, those within it included."""

    names: list[str]
    local: list[Move]
    between: list[Move]

    @cached_property
    def load(self) -> Counter[tuple[str, int]]:
        found = Counter[tuple[str, int]]()
        for move in self.local:
            found["gets", move.destination] += move_bytes(move)
        for move in self.between:
            size = move_bytes(move)
            found["gives", move.source] += size
            found["gets", move.destination] += size
        return found

    @property
    def busiest(self) -> tuple[str, int] | None:
        """Who gives or gets most."""
        return max(self.load, key=lambda end: self.load[end], default=None)


def _joined(groups: Iterable[_Moving]) -> Iterator[list[_Moving]]:
    """What moves in one portion: of each rank that is busiest with some of them one in turn, as long as no rank gives
    or gets much."""
    queues: dict[tuple[str, int] | None, deque[_Moving]] = defaultdict(deque)
    for own in groups:
        queues[own.busiest].append(own)
    portion, total = list[_Moving](), Counter[tuple[str, int]]()
    while queues:
        for end in list(queues):
            own = queues[end].popleft()
            if portion and any(total[place] + size > PORTION_BYTES for place, size in own.load.items()):
                yield portion
                portion, total = [], Counter[tuple[str, int]]()
            portion.append(own)
            total += own.load
            if not queues[end]:
                del queues[end]
    if portion:
        yield portion


def _portion(parts: Sequence[_Moving]) -> Portion:
    return Portion(
        tuple(name for own in parts for name in own.names), tuple(move for own in parts for move in own.local),
        tuple(_rounds(move for own in parts for move in own.between)),
    )  # fmt: skip


def gathered(layout: StateLayout) -> Counter[tuple[int, int]]:
    """Bytes of parameters, by who gives and who gets them, that ranks collect which keep parameters whole and the rest
    of the state in shards."""
    found, mesh = Counter[tuple[int, int]](), Mesh.of(layout.plan)
    for rank in mesh.world if layout.plan.shards > 1 and layout.sharding(0).whole else ():
        flats = [flat for bucket in layout.buckets(rank).values() for flat in (bucket.trained, bucket.frozen) if flat]
        size = sum(flat.shard_size for flat in flats) * BYTES[layout.facts.dtype]
        for other in mesh.zero_group(rank):
            found[rank, other] += size if other != rank else 0
    return found


def parameter_of(name: str) -> str:
    """Whose state a tensor is: `optimizer/exp_avg/wte.weight`, `model/wte.weight`."""
    kind, _, rest = name.partition("/")
    return rest.partition("/")[2] if kind == "optimizer" else rest


def move_bytes(move: Move) -> int:
    return move.box.numel * BYTES.get(move.dtype, 1)


def _closed(bucketings: Sequence[Mapping[int, Sequence[ParameterFacts]]]) -> list[list[str]]:
    """The names of parameters, those together that share a bucket anywhere, in the order of the last bucketing."""
    leader: dict[str, str] = {}

    def find(name: str) -> str:
        while leader[name] != name:
            name = leader[name] = leader[leader[name]]
        return name

    for buckets in bucketings:
        for own in buckets.values():
            names = [each.name for each in own]
            for name in names:
                leader.setdefault(name, name)
            for name in names[1:]:
                leader[find(name)] = find(names[0])
    groups: dict[str, list[str]] = defaultdict(list)
    for own in (bucketings[-1][index] for index in sorted(bucketings[-1])):
        for each in own:
            groups[find(each.name)].append(each.name)
    return list(groups.values())


def _moving(old: Layout, new: Layout, groups: Sequence[Sequence[str]]) -> list[_Moving]:
    found = [_Moving(list(names), [], []) for names in groups if names]
    of_name = {name: own for own in found for name in own.names}
    for move in plan_moves(old, new):
        own = of_name[move.name]
        (own.local if move.source == move.destination else own.between).append(move)
    return found


def _rounds(moves: Iterable[Move]) -> Iterator[tuple[Move, ...]]:
    """In order; in none of them does a rank send or receive more than so many bytes."""
    own: list[Move] = []
    sent, received = Counter[int](), Counter[int]()
    for whole in moves:
        for move in _cut(whole):
            size = move_bytes(move)
            if own and max(sent[move.source], received[move.destination]) + size > ROUND_BYTES:
                yield tuple(own)
                own, sent, received = [], Counter[int](), Counter[int]()
            own.append(move)
            sent[move.source] += size
            received[move.destination] += size
    if own:
        yield tuple(own)


def _cut(move: Move) -> Iterator[Move]:
    """As moves of boxes of which none is too large for a round."""
    box = move.box
    dim = next((dim for dim, size in enumerate(box.shape) if size > 1), None)
    if dim is None or move_bytes(move) <= ROUND_BYTES:
        yield move
        return
    half = box.shape[dim] // 2
    for begin, size in ((0, half), (half, box.shape[dim] - half)):
        offset = tuple(o + begin * (d == dim) for d, o in enumerate(box.offset))
        shape = tuple(size if d == dim else s for d, s in enumerate(box.shape))
        yield from _cut(move._replace(box=Box(offset, shape)))


def _only(layout: Layout, names: set[str]) -> dict[int, tuple[StateShard, ...]]:
    return {rank: tuple(shard for shard in shards if shard.name in names) for rank, shards in layout.items()}
