"""Known devices: what one offers, from whom that is known, and whether it was published, measured or assumed.

Rates are those of dense products in 16 bits with 32-bit sums, without sparsity, and of one direction of a link. What
programs reach of them is not known here (`cost.py`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from phalanx.errors import ConfigError, nearest

GB, TB = 1e9, 1e12
GIB = 2**30


class Figure(NamedTuple):
    """A number of a device. known: published, measured or assumed."""

    value: float
    source: str
    known: str = "published"


_PCIE3 = Figure(12 * GB, "PCIe 3.0 x16, of which copies reach 3/4", "assumed")
_PCIE4 = Figure(24 * GB, "PCIe 4.0 x16, of which copies reach 3/4", "assumed")
_PCIE5 = Figure(50 * GB, "PCIe 5.0 x16, measured on an H200 with copies both ways", "measured")
_C2C = Figure(300 * GB, "NVLink-C2C: 450 GB/s each way, of which copies reach 2/3", "assumed")
_OWN = Figure(10 * GB, "the same memory", "assumed")


@dataclass(frozen=True)
class Device:
    """memory: bytes. flops: per second. bandwidth: of its memory, bytes/s. link: to the other devices of its node,
    bytes/s each way. network: of a usual node of such devices to other nodes, bytes/s each way. per_node: devices.
    host: to the memory of its host, bytes/s each way."""

    name: str
    memory: Figure
    flops: Figure
    bandwidth: Figure
    link: Figure
    link_name: str
    network: Figure
    per_node: int
    host: Figure = _PCIE4

    @property
    def figures(self) -> dict[str, Figure]:
        names = ("memory", "flops", "bandwidth", "link", "network", "host")
        return {name: getattr(self, name) for name in names}


def _device(
    name: str, source: str, memory_gib: float, tflops: float, gb_per_s: float, link: tuple[str, float, str],
    network: tuple[float, str], per_node: int = 8, known: str = "published", host: Figure | None = None,
) -> Device:  # fmt: skip
    """link: its name, GB/s each way, source. network: Gbit/s of a node, source; one without a source is assumed."""
    return Device(
        name, Figure(memory_gib * GIB, source, known), Figure(tflops * TB, source, known),
        Figure(gb_per_s * GB, source, known), Figure(link[1] * GB, link[2] or "assumed", _known(link[2])), link[0],
        Figure(network[0] / 8 * GB, network[1] or "assumed", _known(network[1])), per_node, host or _PCIE4,
    )  # fmt: skip


def _known(source: str) -> str:
    return "published" if source else "assumed"


_DEVICES = (
    _device("V100", "NVIDIA V100 datasheet (SXM2, 32 GB)", 32, 125, 900,
            ("nvlink", 150, "NVIDIA V100 datasheet: 300 GB/s both ways"), (400, "DGX-1: 4 x 100 Gbit/s"),
            host=_PCIE3),
    _device("V100-16", "NVIDIA V100 datasheet (SXM2, 16 GB)", 16, 125, 900,
            ("nvlink", 150, "NVIDIA V100 datasheet: 300 GB/s both ways"), (25, "AWS p3.16xlarge: 25 Gbit/s"),
            host=_PCIE3),
    _device("A100-40", "NVIDIA A100 datasheet (SXM4, 40 GB)", 40, 312, 1555,
            ("nvlink", 300, "NVIDIA A100 datasheet: 600 GB/s both ways"), (400, "AWS p4d.24xlarge: 4 x 100 Gbit/s")),
    _device("A100", "NVIDIA A100 datasheet (SXM4, 80 GB)", 80, 312, 2039,
            ("nvlink", 300, "NVIDIA A100 datasheet: 600 GB/s both ways"), (1600, "DGX A100: 8 x 200 Gbit/s")),
    _device("H100", "NVIDIA H100 datasheet (SXM5)", 80, 989.4, 3350,
            ("nvlink", 450, "NVIDIA H100 datasheet: 900 GB/s both ways"), (3200, "DGX H100: 8 x 400 Gbit/s"),
            host=_PCIE5),
    _device("H200", "NVIDIA H200 datasheet (SXM)", 140, 989.4, 4800,
            ("nvlink", 450, "NVIDIA H200 datasheet: 900 GB/s both ways"), (3200, "DGX H200: 8 x 400 Gbit/s"),
            host=_PCIE5),
    _device("H100-96", "torchtitan's reports name it: 500 W, HBM2e; rates assumed in proportion", 96, 800, 2400,
            ("nvlink", 450, "NVIDIA H100 datasheet: 900 GB/s both ways"), (3200, "8 x 400 Gbit/s"), known="assumed",
            host=_PCIE5),
    _device("GH200", "NVIDIA GH200 datasheet (96 GB)", 96, 989.4, 4000,
            ("nvlink", 450, "NVIDIA GH200 datasheet: 900 GB/s both ways"), (800, "Alps: 4 x 200 Gbit/s"), 4,
            host=_C2C),
    _device("B200", "NVIDIA DGX B200 datasheet", 180, 2250, 8000,
            ("nvlink", 900, "NVIDIA DGX B200 datasheet: 14.4 TB/s of 8 devices, both ways"),
            (3200, "DGX B200: 8 x 400 Gbit/s"),
            host=_PCIE5),
    _device("MI300X", "AMD Instinct MI300X datasheet", 192, 1307.4, 5300,
            ("infinity fabric", 448, "AMD Instinct MI300X platform: 7 links of 64 GB/s"), (3200, ""),
            host=_PCIE5),
    _device("RTX 3090", "NVIDIA Ampere GA102 whitepaper", 24, 71, 936, ("pcie", 16, ""), (25, "")),
    _device("RTX 4090", "NVIDIA Ada GPU architecture whitepaper", 24, 165.2, 1008, ("pcie", 25, ""), (25, "")),
    _device("T4", "NVIDIA T4 datasheet", 16, 65, 320, ("pcie", 12, ""), (50, "AWS g4dn.12xlarge: 50 Gbit/s"), 4,
            host=_PCIE3),
    _device("L4", "NVIDIA L4 datasheet", 24, 121, 300, ("pcie", 25, ""), (100, "Google g2-standard-96: 100 Gbit/s")),
    _device("CPU", "one core of a data-centre CPU", 4, 0.05, 10, ("memory", 2.9, ""), (10, ""), 4, known="assumed",
            host=_OWN),
)  # fmt: skip
DEVICES: Mapping[str, Device] = {device.name: device for device in _DEVICES}

_OTHER_NAMES = {
    "a100-80": "A100", "a100-80gb": "A100", "a100-40gb": "A100-40", "v100-32": "V100", "v100-32gb": "V100",
    "v100-16gb": "V100-16", "h100-80gb": "H100", "h200-141gb": "H200", "3090": "RTX 3090", "4090": "RTX 4090",
    "t4-16gb": "T4", "h100-96gb": "H100-96", "gh200-96gb": "GH200", "a800-80gb": "A100", "mi300": "MI300X",
}  # fmt: skip


def find(name: str) -> Device:
    """By any usual spelling; a ConfigError that says what is known."""
    key = re.sub(r"[\s_-]+", "-", name.strip().lower())
    spelled = {known.lower().replace(" ", "-"): known for known in DEVICES} | _OTHER_NAMES
    spelled |= {known.replace("-", ""): meant for known, meant in tuple(spelled.items())}
    if key not in spelled:
        message = f"cluster: no device {name.strip()!r} is known"
        raise ConfigError(message, f"{nearest(name.strip().upper(), DEVICES)}; a file may describe others")
    return DEVICES[spelled[key]]
