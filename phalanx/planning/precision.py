"""What devices reach in the precision of a run: their figures are those of 16 bits, a CPU core's those of float32."""

from __future__ import annotations

import re
from dataclasses import replace

from phalanx.planning.cluster import Cluster
from phalanx.planning.devices import Device, Figure

# Dense peak FLOP/s (bfloat16 on tensor cores, float32 without TF32) by a word of the device's name; the first row that
# matches counts, so variants stand before the plain name.
PEAK_FLOPS: tuple[tuple[str, float, float], ...] = (
    ("GB200", 2500e12, 80e12),
    ("B200", 2250e12, 75e12),
    ("H200", 989e12, 67e12),
    ("GH200", 989e12, 67e12),
    ("H100 PCIe", 756e12, 51e12),
    ("H100 NVL", 835e12, 60e12),
    ("H100", 989e12, 67e12),
    ("H800", 989e12, 67e12),
    ("A100", 312e12, 19.5e12),
    ("A800", 312e12, 19.5e12),
    ("L40S", 362e12, 91.6e12),
    ("L40", 181e12, 90.5e12),
    ("L4", 121e12, 30.3e12),
    ("A40", 149.7e12, 37.4e12),
    ("A30", 165e12, 10.3e12),
    ("A10G", 70e12, 35e12),
    ("A10", 125e12, 31.2e12),
    ("RTX A6000", 154.8e12, 38.7e12),
    ("RTX 5090", 209.5e12, 104.8e12),
    ("RTX 4090", 165.2e12, 82.6e12),
    ("RTX 3090", 71e12, 35.6e12),
    ("MI300X", 1307e12, 163.4e12),
    ("MI250X", 383e12, 47.9e12),
)
_USUAL = {"bfloat16": 1.0, "float16": 1.0, "float32": 1 / 8, "float64": 1 / 32}  # of 16-bit rates, where not known
_ON_CPU = {"bfloat16": 0.5, "float16": 0.25, "float32": 1.0, "float64": 0.5}  # of those of float32, assumed


def peak_flops(device_name: str, dtype: str) -> float | None:
    """Dense peak FLOP/s of one device, None where it is not known (CPUs, other devices, other precisions)."""
    column = {"bfloat16": 1, "float16": 1, "float32": 2}.get(dtype)
    for row in PEAK_FLOPS:
        if column and re.search(rf"\b{re.escape(row[0])}\b", device_name, re.IGNORECASE):
            return float(row[column])
    return None


def flops_in(dtype: str, name: str, usual: Device) -> Figure:
    """FLOP/s of a GPU of this name, published where that is known, else as of the one that is `usual`."""
    published = peak_flops(name, dtype)
    if published is not None:
        return Figure(published, f"{name}, {dtype}")
    return Figure(usual.flops.value * _USUAL[dtype], f"{usual.name}, {dtype}", "assumed")


def in_precision(cluster: Cluster, dtype: str) -> Cluster:
    """The same devices with their FLOP/s in this precision."""
    return Cluster(tuple(replace(kind, device=device_in(dtype, kind.device)) for kind in cluster.nodes))


def device_in(dtype: str, device: Device) -> Device:
    """What a user gives holds for whatever precision the user has in mind."""
    if device.flops.known == "given":
        return device
    if device.name == "CPU":
        return replace(device, flops=device.flops._replace(value=device.flops.value * _ON_CPU[dtype]))
    return device if _USUAL[dtype] == 1 else replace(device, flops=flops_in(dtype, device.name, device))
