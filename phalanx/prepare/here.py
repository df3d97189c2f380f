"""The devices that are here, as a cluster for planning: every rank says what it has, rank 0 puts it together.

A GPU that planning knows has its published figures, another one what torch says of it and assumed rates; a CPU rank has
so many cores. Ranks that share a device share what it offers.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch

from phalanx.launch.context import RankContext
from phalanx.observe.metrics import peak_flops
from phalanx.planning.cluster import Cluster, Nodes
from phalanx.planning.cost import Software
from phalanx.planning.devices import DEVICES, Device, Figure
from phalanx.planning.rates import Rates, is_of, on_cluster
from phalanx.prepare.budget import Budget, free_main_memory
from phalanx.profile.hardware import device_name, rates_of
from phalanx.profile.store import rows_here

_KEY = "device of rank"
_USUAL = {"bfloat16": 1.0, "float16": 1.0, "float32": 1 / 8, "float64": 1 / 32}  # of 16-bit rates, where not known
_ON_CPU = {"bfloat16": 0.5, "float16": 0.25, "float32": 1.0, "float64": 0.5}  # of those of float32, assumed
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
    if context.world > 1:
        own = RankDevice.of(context, memory)
        context.store.set(f"{_KEY} {context.rank}", json.dumps(vars(own)))


def cluster_here(context: RankContext, memory: int | None, dtype: str) -> Cluster:
    """On rank 0, of all ranks. memory: that a rank may hold, where the user said so."""
    if context.world == 1:
        found = [RankDevice.of(context, memory)]
    else:
        texts = (context.store.get(f"{_KEY} {rank}") for rank in range(context.world))
        found = [RankDevice(**_checked(json.loads(text))) for text in texts]
    return cluster_of(found, dtype, is_shared=memory is None)


def planned_here(context: RankContext, memory: int | None, dtype: str) -> tuple[Cluster, Software]:
    """The cluster, and what software reaches there; by what `phalanx profile` measured of it, where it did."""
    cluster, software = cluster_here(context, memory, dtype), Software()
    rates = _measured(context, cluster, dtype)
    return (cluster, software) if rates is None else on_cluster(cluster, software, rates)


def _measured(context: RankContext, cluster: Cluster, dtype: str) -> Rates | None:
    """Of devices that are all alike, with as many ranks on a node; of GPUs of their own also with one."""
    device, ranks = torch.device(context.device), cluster.per_node
    if len(cluster.nodes) > 1:
        return None
    rows = rows_here()
    found = rates_of(rows, device_name(device), dtype, ranks)
    if found is None and device.type == "cuda" and torch.cuda.device_count() >= ranks:
        found = rates_of(rows, device_name(device), dtype, 1)
    return found


def _checked(row: Any) -> dict[str, Any]:
    kinds = {"node": int, "name": str, "place": str, "memory": int, "cores": (int, float), "host": int}
    assert isinstance(row, dict) and all(isinstance(row.get(name), kind) for name, kind in kinds.items())
    return {name: row[name] for name in kinds}


def cluster_of(ranks: list[RankDevice], dtype: str, is_shared: bool = True) -> Cluster:
    """is_shared: the memory that a CPU rank names is that of its node, not its own."""
    nodes = [list(own) for _, own in groupby(ranks, key=lambda rank: rank.node)]
    made = [_node(own, dtype, is_shared) for own in nodes]
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
    published = peak_flops(name, dtype)
    if published is not None:
        flops = Figure(published, f"{name}, {dtype}")
    else:
        flops = Figure(usual.flops.value * _USUAL[dtype], f"{usual.name}, {dtype}", "assumed")
    return replace(usual, name=usual.name if alike else name, flops=flops)


def _cpu(num_cores: float, dtype: str) -> Device:
    own = DEVICES["CPU"]
    rate = own.flops.value * num_cores * _ON_CPU[dtype]
    return replace(own, flops=own.flops._replace(value=rate))


def _divided(device: Device, parts: int) -> Device:
    if parts == 1:
        return device
    flops, bandwidth = (figure._replace(value=figure.value / parts) for figure in (device.flops, device.bandwidth))
    return replace(device, flops=flops, bandwidth=bandwidth)
