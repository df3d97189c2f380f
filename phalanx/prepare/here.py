"""The devices that are here, as a cluster for planning: every rank says what it has, rank 0 puts it together.

A GPU that planning knows has its published figures, another one what torch says of it and assumed rates; a CPU rank has
so many cores. Ranks that share a device share what it offers.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections import Counter
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch

from phalanx.errors import ConfigError
from phalanx.launch.context import RankContext
from phalanx.planning.cluster import Cluster, Nodes, stated_network
from phalanx.planning.cost import Software
from phalanx.planning.devices import DEVICES, Device
from phalanx.planning.precision import device_in, flops_in
from phalanx.planning.rates import Spread, is_of, on_cluster
from phalanx.prepare.budget import Budget, free_main_memory
from phalanx.profile.hardware import BRIEF, device_name, measure_joined, rates_of
from phalanx.profile.store import Say, Store, profiles_path, rows_here

_KEY = "device of rank"
_UNKNOWN = DEVICES["A100"]  # stands for a GPU of which nothing is known


@dataclass(frozen=True)
class RankDevice:
    """What a rank says of itself. place: tells devices apart, cores: that a CPU rank may use; memory: bytes that it may
    hold, of a CPU rank those of all ranks of its node together. host: bytes of main memory that are free on the node of
    a GPU; 0 where that is not known."""

    node: int
    name: str
    place: str
    memory: int
    cores: float
    host: int = 0

    @staticmethod
    def of(context: RankContext, memory: int | None) -> RankDevice:
        """memory: what was asked for."""
        device = torch.device(context.device)
        budget = Budget.of(memory, device)
        size = budget.bytes if budget is not None else int(DEVICES["CPU"].memory.value)
        if device.type == "cuda":
            name = torch.cuda.get_device_name(device)
            return RankDevice(context.node, name, f"{context.node}/{context.device}", size, 0, free_main_memory() or 0)
        return RankDevice(context.node, "CPU", f"{context.node}/{context.rank}", size, cores())


def cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)


def announce(context: RankContext, memory: int | None) -> None:
    """Before rank 0 plans; nobody waits here."""
    stated_network(os.environ)  # one that is none is refused
    if context.world > 1:
        own = RankDevice.of(context, memory)
        context.store.set(f"{_KEY} {context.rank}", json.dumps(vars(own)))


def are_announced(context: RankContext) -> bool:
    """Whether all ranks have said what they have."""
    return context.world == 1 or context.store.check([f"{_KEY} {rank}" for rank in range(context.world)])


def measure_here(context: RankContext, dtype: str, say: Say) -> None:
    """By all ranks, before rank 0 plans: briefly, and only what was not measured here before."""
    store = usable_store() if context.rank == 0 else None

    def progress(done: int, of: int) -> None:
        if done < of and not said:
            said.append(f"measuring what the devices here reach ({of - done} measurements), to plan by it")
            say(said[0])

    said: list[str] = []
    with contextlib.suppress(ConfigError):  # ranks that are not alike are planned for by what is published
        measure_joined(context, store, dtype, BRIEF, progress)


def usable_store() -> Store | None:
    """A run goes on without one."""
    store = Store(profiles_path(), to_stderr)
    try:
        store.rows()
    except ConfigError:
        return None
    return store


def to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def cluster_here(context: RankContext, memory: int | None, dtype: str) -> Cluster:
    """On rank 0, of all ranks. memory: that a rank may hold, where the user said so."""
    return cluster_of(_found(context, memory), dtype, memory is None, stated_network(os.environ))


def _found(context: RankContext, memory: int | None) -> list[RankDevice]:
    if context.world == 1:
        return [RankDevice.of(context, memory)]
    texts = (context.store.get(f"{_KEY} {rank}") for rank in range(context.world))
    return [RankDevice(**_checked(json.loads(text))) for text in texts]


def planned_here(context: RankContext, memory: int | None, dtype: str) -> tuple[Cluster, Software]:
    """The cluster, and what software reaches there; by what was measured of it, where it was."""
    cluster, software = cluster_here(context, memory, dtype), Software()
    spread = _spread(_found(context, memory))
    name = device_name(torch.device(context.device))
    rates = rates_of(rows_here(), name, dtype, spread) if spread is not None and len(cluster.nodes) == 1 else None
    return (cluster, software) if rates is None else on_cluster(cluster, software, rates)


def _spread(ranks: list[RankDevice]) -> Spread | None:
    """None where nodes are not alike."""
    nodes: dict[int, list[str]] = {}
    for rank in ranks:
        nodes.setdefault(rank.node, []).append(rank.place)
    counts = {(len(places), len(set(places))) for places in nodes.values()}
    return Spread(*counts.pop(), len(nodes)) if len(counts) == 1 else None


def _checked(row: Any) -> dict[str, Any]:
    kinds = {"node": int, "name": str, "place": str, "memory": int, "cores": (int, float), "host": int}
    assert isinstance(row, dict) and all(isinstance(row.get(name), kind) for name, kind in kinds.items())
    return {name: row[name] for name in kinds}


def cluster_of(ranks: list[RankDevice], dtype: str, is_shared: bool = True, network: float | None = None) -> Cluster:
    """is_shared: the memory that a CPU rank names is that of its node, not its own. network: bytes/s each way of a
    node, where that is said."""
    nodes = [list(own) for _, own in groupby(ranks, key=lambda rank: rank.node)]
    made = [_node(own, dtype, is_shared) for own in nodes]
    if network is not None:
        made = [replace(kind, network=network) for kind in made]
    kinds = [replace(kind, count=len(list(same))) for kind, same in groupby(made)]
    return Cluster.of(kinds)


def _node(ranks: list[RankDevice], dtype: str, is_shared: bool) -> Nodes:
    """As fast as its slowest rank."""
    sharing = Counter(rank.place for rank in ranks)
    if ranks[0].name == "CPU":
        share = min(rank.cores for rank in ranks) / len(ranks)
        device = _cpu(max(share, 0.1), dtype)
        memory = min(rank.memory for rank in ranks) / (len(ranks) if is_shared else 1)
    else:
        slowest = min(ranks, key=lambda rank: known_device(rank.name, rank.memory, dtype).flops.value)
        most = max(sharing.values())
        device = _divided(known_device(slowest.name, slowest.memory, dtype), most)
        memory = min(rank.memory / (sharing[rank.place] if is_shared else 1) for rank in ranks)
    host = min(rank.host for rank in ranks)
    return Nodes(1, len(ranks), device, device.link.value, device.network.value, memory, host=host)


def known_device(name: str, memory: float, dtype: str) -> Device:
    """What planning knows of a GPU by torch's name of it, at the precision of a run; of several the one whose memory is
    nearest."""
    alike = [own for own in DEVICES.values() if own.name != "CPU" and is_of(name, own)]
    usual = min(alike, key=lambda own: abs(own.memory.value - memory), default=_UNKNOWN)
    return replace(usual, name=usual.name if alike else name, flops=flops_in(dtype, name, usual))


def _cpu(num_cores: float, dtype: str) -> Device:
    own = device_in(dtype, DEVICES["CPU"])
    return replace(own, flops=own.flops._replace(value=own.flops.value * num_cores))


def _divided(device: Device, parts: int) -> Device:
    if parts == 1:
        return device
    flops, bandwidth = (figure._replace(value=figure.value / parts) for figure in (device.flops, device.bandwidth))
    return replace(device, flops=flops, bandwidth=bandwidth)
