"""Which state only one rank holds, who keeps a second copy of it, and what nobody holds when ranks are lost: pure, and
the same on every rank.

Ranks stand in a ring, and each keeps what the one before it holds alone: of copies the elements, of what is kept
current by gradients the pieces of parameters, which are updated whole.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace

from phalanx.adapt.portions import parameter_of
from phalanx.params.layout_of import SlotsOf, StateLayout
from phalanx.state.layout import Box, Layout, StateShard


def stays(before: Layout, after: Layout) -> bool:
    """Whether every rank already has what it is to have."""
    return all(_parts(before.get(rank, ())) == _parts(shards) for rank, shards in after.items())


def _parts(shards: Iterable[StateShard]) -> list[tuple[str, str, tuple[Box, ...]]]:
    return [(shard.name, shard.dtype, shard.boxes) for shard in shards]


def missing(before: Layout, after: Layout) -> list[str]:
    """The tensors of which a rank is to have elements that no rank has."""
    sources: dict[str, dict[Box, None]] = defaultdict(dict)
    for shard in (shard for shards in before.values() for shard in shards):
        sources[shard.name].update(dict.fromkeys(shard.boxes))
    wanted: dict[str, dict[Box, None]] = defaultdict(dict)
    for shard in (shard for shards in after.values() for shard in shards):
        wanted[shard.name].update(dict.fromkeys(box for box in shard.boxes if box not in sources[shard.name]))
    return [name for name, boxes in wanted.items() if any(left_of(box, sources[name]) for box in boxes)]


def left_of(box: Box, sources: Iterable[Box]) -> list[Box]:
    """What of a box is in none of these."""
    left = [box] if box.numel else []
    for source in sources:
        left = [rest for part in left for rest in part.without(source)]
        if not left:
            break
    return left


Boxes = tuple[Box, ...]


def lone(layout: Layout) -> dict[int, tuple[StateShard, ...]]:
    """Of every rank the elements that no other rank holds; names of which there are none are left out."""
    holders: dict[str, list[tuple[int, StateShard]]] = defaultdict(list)
    for rank, shards in layout.items():
        for shard in shards:
            holders[shard.name].append((rank, shard))
    known: dict[
        tuple[tuple[int, int], ...], dict[int, Boxes]
    ] = {}  # a parameter and its averages lie in the same boxes
    found: dict[int, list[StateShard]] = {rank: [] for rank in layout}
    for own in holders.values():
        key = tuple((rank, id(shard.boxes)) for rank, shard in own)
        if key not in known:
            known[key] = _lone_boxes({rank: shard.boxes for rank, shard in own})
        for rank, shard in own:
            if boxes := known[key][rank]:
                found[rank].append(replace(shard, boxes=boxes, owned=False))
    return {rank: tuple(shards) for rank, shards in found.items()}


def _lone_boxes(held: dict[int, Boxes]) -> dict[int, Boxes]:
    times: dict[Boxes, int] = defaultdict(int)
    for boxes in held.values():
        times[boxes] += 1
    return {
        rank: ()
        if times[boxes] > 1
        else tuple(
            part
            for box in boxes
            for part in left_of(box, [other for r, others in held.items() if r != rank for other in others])
        )
        for rank, boxes in held.items()
    }


def mirrored(layout: Layout) -> dict[int, tuple[StateShard, ...]]:
    """What every rank keeps for the one before it."""
    ring, alone = sorted(layout), lone(layout)
    if len(ring) < 2:
        return {rank: () for rank in ring}
    return {rank: alone[ring[place - 1]] for place, rank in enumerate(ring)}


def beside(own: Sequence[StateShard], kept: Sequence[StateShard]) -> tuple[StateShard, ...]:
    """A rank's own state and what it keeps for another, as one: of a tensor in both, its own boxes come first."""
    others = {shard.name: shard for shard in kept}
    joined = [
        replace(shard, boxes=(*shard.boxes, *others.pop(shard.name).boxes)) if shard.name in others else shard
        for shard in own
    ]
    return (*joined, *others.values())


def mirror_of(nodes: Sequence[int]) -> dict[int, int]:
    """Of every rank the one that mirrors it: on another machine, as far as none has more than half of the ranks. nodes:
    the machine of each rank."""
    ring = sorted(range(len(nodes)), key=lambda rank: nodes[rank])
    most = max(map(nodes.count, nodes))
    ahead = most if most < len(ring) else 1
    return {rank: ring[(place + ahead) % len(ring)] for place, rank in enumerate(ring)}


def lone_parameters(layout: StateLayout) -> dict[int, frozenset[str]]:
    """Of every rank the parameters of whose pieces there it has elements that no other rank has."""
    alone = lone(layout.all_parameters())
    return {rank: frozenset(shard.name for shard in shards) for rank, shards in alone.items()}


def lone_state(layout: StateLayout, rank: int, names: frozenset[str], slots: SlotsOf) -> tuple[StateShard, ...]:
    """All that a rank keeps of these parameters."""
    found = (shard for shard in layout.state(rank, slots) if parameter_of(shard.name) in names)
    return tuple(replace(shard, owned=False) for shard in found)
