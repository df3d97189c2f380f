"""What was measured of a device, in the place of what is published and assumed of it.

Products of matrices of several sizes, memory, the link to the host, and collectives between the ranks of a node become
the same few figures and shares that planning uses for any device. Pure; `profile/hardware.py` measures.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from phalanx.planning.cluster import Cluster, Nodes
from phalanx.planning.cost import Software
from phalanx.planning.devices import Device, Figure

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "send")
SPEEDS = ("computing", "computing beneath", "all_reduce beneath")
MOST_BEYOND = 1.5  # that a device may be faster than it was ever seen
Points = tuple[tuple[float, float], ...]  # size, and what was measured there


@dataclass(frozen=True)
class Rates:
    """products: side of square matrices, FLOP/s of one of `ranks` ranks that all multiply. bandwidth: bytes/s of each
    that copies. host: bytes/s to the host's memory. collectives: by name, bytes and seconds. speeds: as
    a share of that alone, of computation beside so many ranks that compute (its own counts), and of both where a sum of
    all ranks travels beneath the computation of so many. source: who, when."""

    device: str
    dtype: str
    ranks: int
    products: Points
    bandwidth: float
    host: float | None = None
    collectives: Mapping[str, Points] = field(default_factory=dict[str, Points])
    source: str = "measured here"
    speeds: Mapping[str, Points] = field(default_factory=dict[str, Points])


def is_of(measured: str, device: Device) -> bool:
    """Whether a name such as `NVIDIA H100 80GB HBM3`, as torch gives it, is that of a device that planning knows."""
    words = set(re.split(r"[^a-z0-9]+", measured.lower()))
    return words_of(device.name) <= words


def words_of(name: str) -> set[str]:
    """Of a device's name; `A100-40` is told from `A100` by its memory only."""
    return set(re.split(r"[^a-z0-9]+", name.lower().partition("-")[0]))


def on_cluster(cluster: Cluster, software: Software, rates: Rates) -> tuple[Cluster, Software]:
    """The same cluster with what was measured of its devices: shares of published figures then count for nothing."""
    peak, small = saturation(rates.products)
    link, latency = _link(rates)
    kinds = tuple(_nodes(kind, rates, peak, link) for kind in cluster.nodes)
    shares = replace(
        software, products=1.0, small=small / 2, attention=software.attention / software.products, memory=1.0,
        link=1.0 if link else software.link, link_latency=software.link_latency if latency is None else latency,
        contention=_contention(rates, software),
    )  # fmt: skip
    return Cluster(kinds), shares


def _nodes(kind: Nodes, rates: Rates, peak: float, link: float | None) -> Nodes:
    device = _device(kind.device, rates, peak)
    return replace(kind, device=device, link=link or kind.link)


def _device(device: Device, rates: Rates, peak: float) -> Device:
    def measured(value: float) -> Figure:
        return Figure(value, rates.source, "measured")

    return replace(device, flops=measured(peak), bandwidth=measured(rates.bandwidth))


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


def _link(rates: Rates) -> tuple[float | None, float | None]:
    """bytes/s and seconds of a hop, from sums over all ranks of a node: 2 (n - 1) / n of the bytes, and as many hops as
    a tree has there and back."""
    points = rates.collectives.get("all_reduce", ())
    if len(points) < 2 or rates.ranks < 2:
        return None, None
    slope, offset = _line([size for size, _ in points], [seconds for _, seconds in points])
    largest, slowest = max(points)
    hops = 2 * (rates.ranks - 1)
    if slope <= 0:
        return hops / rates.ranks * largest / slowest, None
    return hops / rates.ranks / slope, max(0.0, offset) / (2 * math.ceil(math.log2(rates.ranks)))


def _contention(rates: Rates, software: Software) -> float:
    """Seconds that computation loses for each of communication beneath it."""
    found = rates.speeds.get("computing beneath")
    return software.contention if not found else min(1.0, max(0.0, 1 - found[-1][1]))


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
