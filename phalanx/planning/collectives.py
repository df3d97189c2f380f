"""How long ranks of a cluster take to communicate, by what connects them: rings inside a node and between nodes.

A group has so many ranks on each node it touches. What leaves a node shares its network with the other ranks of the
node, which do the same at the same time. Pure arithmetic.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Links:
    """bytes/s each way that sums reach: `link` of a device inside its node, `network` of a whole node of `per_node`
    devices. gathers, sends: times that, what gathers and messages reach."""

    link: float
    network: float
    per_node: int
    link_latency: float = 0.0
    network_latency: float = 0.0
    gathers: float = 1.0
    sends: float = 1.0
    network_gathers: float = 1.0
    network_sends: float = 1.0


@dataclass(frozen=True)
class Group:
    """size: ranks. on_node: how many of them lie on each node that the group touches."""

    size: int
    on_node: int

    @property
    def num_nodes(self) -> int:
        return -(-self.size // self.on_node)


def consecutive(size: int, stride: int, per_node: int) -> Group:
    """`size` ranks, each `stride` behind the last, where a node has `per_node`."""
    on_node = min(size, max(1, per_node // stride)) if stride < per_node else 1
    return Group(size, on_node)


def gather(links: Links, group: Group, size: float) -> float:
    """Every rank gets all of `size` bytes, of which each had a part; scattering a sum takes as long."""
    if group.size == 1 or not size:
        return 0.0
    return _ring(links, group, size, links.gathers, links.network_gathers) + _latency(links, group)


def all_reduce(links: Links, group: Group, size: float) -> float:
    if group.size == 1 or not size:
        return 0.0
    return 2 * (_ring(links, group, size) + _latency(links, group))


def send(links: Links, size: float, is_near: bool) -> float:
    """From one rank to another, while all ranks of its node do the same."""
    if is_near:
        return links.link_latency + size / (links.sends * links.link)
    rate = min(links.sends * links.link, links.network_sends * links.network / links.per_node)
    return links.network_latency + size / rate


def _ring(links: Links, group: Group, size: float, near: float = 1.0, far: float = 1.0) -> float:
    """All but a rank's own part passes through the slowest link. A node's network carries a ring for every rank of it
    that is alone in its group there."""
    rate = near * links.link
    if group.num_nodes > 1:
        rate = min(rate, far * links.network * group.on_node / links.per_node)
    return (group.size - 1) / group.size * size / rate


def _latency(links: Links, group: Group) -> float:
    """Trees inside a node and between nodes."""
    inside = math.ceil(math.log2(min(group.on_node, group.size))) * links.link_latency
    return inside + math.ceil(math.log2(group.num_nodes)) * links.network_latency
