"""What is left of a run's state when ranks are lost: pure, and the same on every rank."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

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
