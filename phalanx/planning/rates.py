"""What was measured of a device, in the place of what is published and assumed of it.

Products of matrices of several sizes, memory, the link to the host, and collectives between the ranks of a node, and
between those of several, become the same few figures and shares that planning uses for any device. Pure;
`profile/hardware.py` measures.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from phalanx.planning.cluster import Cluster, Nodes
from phalanx.planning.cost import Software
from phalanx.planning.devices import Device, Figure

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "send")
SPEEDS = ("computing", "listening", "computing beneath", "all_reduce beneath")
MOST_BEYOND = 1.5  # that a device may be faster than it was ever seen
_SHARES = {"flops": "products", "bandwidth": "memory", "link": "link", "network": "network"}  # what is reached of each
Points = tuple[tuple[float, float], ...]  # size, and what was measured there


@dataclass(frozen=True)
class Spread:
    """How ranks lie that are measured together: so many on each of so many nodes, on so many devices of it. CPU ranks
    are devices of their own."""

    ranks: int = 1
    devices: int = 1
    nodes: int = 1

    @property
    def near(self) -> Spread:
        """Those of a node."""
        return replace(self, nodes=1)

    @property
    def world(self) -> int:
        return self.ranks * self.nodes

    def __str__(self) -> str:
        """The class of their group."""
        if self.nodes > 1:
            return f"{self.ranks} rank{'s' * (self.ranks > 1)} on each of {self.nodes} nodes"
        if self.ranks == 1:
            return "1 rank"
        return f"{self.ranks} ranks of a {'device' if self.devices == 1 else 'node'}"


@dataclass(frozen=True)
class Talk:
    """What communication takes among ranks that lie so. collectives: by name, bytes and seconds. speeds: as a share of
    that alone, of computation beside so many ranks that compute (its own counts), beside so many messages that each
    rank waits for, and of both where a sum of all ranks travels beneath the computation of so many."""

    among: Spread
    collectives: Mapping[str, Points] = field(default_factory=dict[str, Points])
    speeds: Mapping[str, Points] = field(default_factory=dict[str, Points])


@dataclass(frozen=True)
class Rates:
    """products: side of square matrices, FLOP/s of one of the ranks of a node, which all multiply. bandwidth: bytes/s
    of each that copies. host: bytes/s to the host's memory. near: among the ranks of a node; far: among those of
    several. source: who, when."""

    device: str
    dtype: str
    products: Points
    bandwidth: float
    near: Talk
    far: Talk | None = None
    host: float | None = None
    source: str = "measured here"

    @property
    def ranks(self) -> int:
        """Of a node, at the same time."""
        return self.near.among.ranks


def is_of(measured: str, device: Device) -> bool:
    """Whether a name such as `NVIDIA H100 80GB HBM3`, as torch gives it, is that of a device that planning knows."""
    words = set(re.split(r"[^a-z0-9]+", measured.lower()))
    return words_of(device.name) <= words


def words_of(name: str) -> set[str]:
    """Of a device's name; `A100-40` is told from `A100` by its memory only."""
    return set(re.split(r"[^a-z0-9]+", name.lower().partition("-")[0]))


def on_cluster(cluster: Cluster, software: Software, rates: Rates) -> tuple[Cluster, Software]:
    """The same cluster with what was measured of its devices: shares of published figures then count for nothing. What
    the user said of the cluster stays, with these shares."""
    peak, small = saturation(rates.products)
    latencies = software.link_latency, software.network_latency
    near = _near(rates.near, latencies[0])
    far = _far(rates.far, near.latency if near else latencies[0], latencies[1]) if rates.far is not None else None
    found = {"flops": peak, "bandwidth": rates.bandwidth, "host": rates.host, "link": near and near.rate,
             "network": far and far.rate}  # fmt: skip
    known = {name: value for name, value in found.items() if value is not None}
    counts = {_SHARES[name]: 1.0 for name in known if name in _SHARES and not _all_give(cluster, name)}
    if "products" in counts:
        counts |= {"small": small / 2, "attention": software.attention / software.products}
    for prefix, own in (("", near), ("network_", far)):
        if own is not None:
            latency = {f"{prefix or 'link_'}latency": own.latency}
            counts |= latency | {f"{prefix}gathers": own.gathers, f"{prefix}sends": own.sends}
    crowd = _crowd(rates)
    shares = replace(
        software, **counts, contention=_contention(rates, software), one_machine=crowd is rates.far,
        crowded=_crowded(crowd), listening=_listening(rates.near),
        # What all ranks of a node reached at the same time, its memory reaches.
        host_copies=max(software.host_copies, rates.ranks * (rates.host or 0.0)),
    )  # fmt: skip
    lost = {name: getattr(software, share) / getattr(shares, share) for name, share in _SHARES.items()}
    return Cluster(tuple(_nodes(kind, known, lost, rates.source) for kind in cluster.nodes)), shares


def _all_give(cluster: Cluster, name: str) -> bool:
    return all(name in kind.given for kind in cluster.nodes)


def _nodes(kind: Nodes, known: Mapping[str, float], lost: Mapping[str, float], source: str) -> Nodes:
    """lost: the part of what was given that programs do not reach, where no share says so any more."""
    device, given = kind.device, kind.given
    figures = {name: Figure(value, source, "measured") for name, value in known.items() if name not in given}
    for name in given & {"flops", "bandwidth"}:
        figure: Figure = getattr(device, name)
        figures[name] = figure._replace(value=lost[name] * figure.value)
    links = {name: figures[name].value for name in ("link", "network") if name in figures}
    links |= {name: lost[name] * getattr(kind, name) for name in ("link", "network") if name in given}
    return replace(kind, device=replace(device, **figures), **links)


def saturation(products: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """(peak, small): of the curve rate = peak · side / (side + small) nearest to what was measured. Its inverse is a
    line over 1 / side, which is fitted with weights that count relative errors."""
    if len(products) == 1:
        return products[0][1], 0.0
    xs, ys = [1 / side for side, _ in products], [1 / rate for _, rate in products]
    slope, offset = _line(xs, ys)
    fastest = max(rate for _, rate in products)
    if offset > 0 and slope > 0 and 1 / offset <= MOST_BEYOND * fastest:
        return 1 / offset, slope / offset
    # Measurements that lie on no such curve: the fastest counts, and what the others lack of it on average.
    lacking = sorted(max(0.0, side * (fastest / rate - 1)) for side, rate in products)
    return fastest, lacking[len(lacking) // 2]


class _Link(NamedTuple):
    """bytes/s and the seconds of a hop of sums, and how much faster gathers and messages are."""

    rate: float
    latency: float
    gathers: float
    sends: float


def _near(talk: Talk, latency: float) -> _Link | None:
    """From ranks of a node: 2 (n - 1) / n of the bytes of a sum pass each link, and as many hops as a tree has there
    and back. latency: of a hop, where nothing says it."""
    found = _fitted(talk)
    if found is None:
        return None
    rate, offset, gathers, sends = found
    hops = math.ceil(math.log2(talk.among.world))
    return _Link(rate, latency if offset is None else offset / (2 * hops), gathers / rate, sends / rate)


def _far(talk: Talk, near_latency: float, latency: float) -> _Link | None:
    """From ranks of several nodes: a node's network carries the ring of all, and messages of all ranks of the node at
    the same time; hops inside nodes come besides."""
    found = _fitted(talk)
    if found is None:
        return None
    rate, offset, gathers, sends = found
    among = talk.among
    inside, between = (math.ceil(math.log2(number)) for number in (among.ranks, among.nodes))
    hop = latency if offset is None else max(0.0, offset / 2 - inside * near_latency) / between
    return _Link(rate, hop, gathers / rate, among.ranks * sends / rate if "send" in talk.collectives else 1.0)


def _fitted(talk: Talk) -> tuple[float, float | None, float, float] | None:
    """bytes/s of sums, their seconds besides, and bytes/s of gathers and of messages; as those of sums where these were
    not measured."""
    ranks, points = talk.among.world, talk.collectives
    passes = (ranks - 1) / ranks
    sums = points.get("all_reduce", ())
    if ranks < 2 or len(sums) < 2:
        return None
    rate, offset = _rate(sums, 2 * passes)
    parts = [dict(points[kind]) for kind in ("all_gather", "reduce_scatter") if kind in points]
    sizes = sorted(set.intersection(*map(set[float], parts))) if parts else []
    both = [(size, sum(part[size] for part in parts) / len(parts)) for size in sizes]  # plans use them in turn
    gathers, sends = (
        _rate(own, passed)[0] if len(own) > 1 else rate for own, passed in ((both, passes), (points.get("send", ()), 1))
    )
    return rate, offset, gathers, sends


def _rate(points: Sequence[tuple[float, float]], passed: float) -> tuple[float, float | None]:
    """(bytes/s, seconds besides). passed: of the bytes, what goes over a link."""
    slope, offset = _line([size for size, _ in points], [seconds for _, seconds in points])
    if slope <= 0:
        largest, seconds = max(points)
        return passed * largest / seconds, None
    return passed / slope, max(0.0, offset)


def _contention(rates: Rates, software: Software) -> float:
    """Seconds that computation loses for each of communication beneath it."""
    every = (talk.speeds.get("computing beneath") for talk in (rates.near, rates.far) if talk is not None)
    found = next(filter(None, every), None)
    return software.contention if not found else min(1.0, max(0.0, 1 - found[-1][1]))


def _crowd(rates: Rates) -> Talk:
    """Who shares what computes: the ranks of a node; or those of several, of which that is measured on one machine."""
    return rates.far if rates.far is not None and "computing" in rates.far.speeds else rates.near


def _crowded(crowd: Talk) -> float:
    """Times that a rank is faster alone than beside all others of these."""
    found = dict(crowd.speeds.get("computing", ()))
    return 1 / found[crowd.among.world] if crowd.among.world in found else 1.0


def _listening(near: Talk) -> float:
    """Seconds that computation loses for each of a message that its rank waits for."""
    found = dict(near.speeds.get("listening", ()))
    return 1 / found[1] - 1 if 1 in found else 0.0


def _line(xs: Sequence[float], ys: Sequence[float]) -> tuple[float, float]:
    """(slope, offset) of least squared relative errors."""
    weights = [1 / y**2 for y in ys]
    total = sum(weights)
    x, y = (sum(w * v for w, v in zip(weights, values, strict=True)) / total for values in (xs, ys))
    spread = sum(w * (own - x) ** 2 for w, own in zip(weights, xs, strict=True))
    if not spread:
        return 0.0, y
    slope = sum(w * (a - x) * (b - y) for w, a, b in zip(weights, xs, ys, strict=True)) / spread
    return slope, y - slope * x
