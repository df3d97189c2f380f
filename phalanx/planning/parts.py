"""Parts of a cluster: devices that a plan may leave out, and seconds that no step of those that stay is below.

Slow nodes hold others back, and so do links that cost more than further devices bring; whole kinds of nodes may be left
out, of one kind nodes, and of one node devices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations

from phalanx.plan.plan import Plan
from phalanx.planning.cluster import Cluster, Nodes
from phalanx.planning.cost import Machine, Software
from phalanx.planning.work import ModelWork

MOST_KINDS = 4  # of which every choice is a part; of more, each alone and all but each
MOST_SAMPLES = 64  # of a micro-batch: with more, products are hardly faster


def parts(cluster: Cluster) -> list[Cluster]:
    """All but the cluster itself, the largest first."""
    found = dict.fromkeys(own for kinds in _choices(cluster.nodes) for own in _of(kinds) if own != cluster)
    return sorted(found, key=lambda own: -own.world)


def _choices(kinds: Sequence[Nodes]) -> Iterator[tuple[Nodes, ...]]:
    every = len(kinds)
    sizes = range(1, every + 1) if every <= MOST_KINDS else (1, every - 1)
    for size in sizes:
        yield from combinations(kinds, size)


def _of(kinds: tuple[Nodes, ...]) -> Iterator[Cluster]:
    yield Cluster(kinds)
    if len(kinds) == 1:
        (kind,) = kinds
        yield from (Cluster((replace(kind, count=count),)) for count in _fewer(kind.count))
        yield from (Cluster((replace(kind, count=1, devices=devices),)) for devices in _fewer(kind.devices))


def _fewer(number: int) -> list[int]:
    """Halves, halves of these, and powers of two."""
    halves = [number >> times for times in range(1, number.bit_length())]
    return sorted({*halves, *(1 << times for times in range((number - 1).bit_length()))})


def left_out(cluster: Cluster, used: Cluster) -> str:
    """What of a cluster a part of it leaves out, in words; empty where it is all of it."""
    rest, words = list(used.nodes), list[str]()
    for kind in cluster.nodes:
        own = next((own for own in rest if _is_part(own, kind)), None)
        if own is None:
            words.append(f"the {kind}")
            continue
        rest.remove(own)
        if own.total < kind.total:
            words.append(f"{kind.total - own.total} of the {kind.total} {kind.device.name}")
    return " and ".join(words)


def _is_part(own: Nodes, kind: Nodes) -> bool:
    return replace(own, count=kind.count, devices=kind.devices) == kind


def least_seconds(model: ModelWork, cluster: Cluster, software: Software, batch: int, slot: int | None = None) -> float:
    """That a step takes at least, whatever is planned: if all devices computed all the time, each as fast as it can
    with large micro-batches, and nothing were exchanged. slot: samples of a micro-batch, where that is given."""
    samples = max(MOST_SAMPLES, slot or 0)
    ideal = replace(software, launch=0.0, call=0.0, odd=1.0)
    rate = 0.0
    for kind in cluster.nodes:
        machine = Machine(kind, ideal, Plan(), samples)
        seconds = [machine.seconds(work, "none").total for work in model.classes]
        rate += kind.total * samples / sum(seconds[place] for place in model.blocks)
    return batch / rate + software.step
