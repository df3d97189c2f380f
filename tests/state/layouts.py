"""What holds for every layout."""

from __future__ import annotations

from phalanx.state.layout import Layout, StateShard, check_disjoint, check_inside, check_tiles


def check_layout(layout: Layout) -> None:
    """Asserts that the owned boxes of every name cover its tensor exactly once and that ranks agree on what it is."""
    by_name: dict[str, list[StateShard]] = {}
    for rank, shards in layout.items():
        names = [shard.name for shard in shards]
        assert len(set(names)) == len(names), f"rank {rank} holds a name twice: {sorted(names)}"
        for shard in shards:
            by_name.setdefault(shard.name, []).append(shard)
    for name, shards in by_name.items():
        kinds = {(shard.shape, shard.dtype) for shard in shards}
        assert len(kinds) == 1, f"ranks disagree on what {name} is: {sorted(kinds)}"
        for shard in shards:
            check_inside(name, shard.shape, shard.boxes)
            check_disjoint(name, shard.boxes)
        check_tiles(name, shards[0].shape, [box for shard in shards if shard.owned for box in shard.boxes])
