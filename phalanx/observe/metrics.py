"""How fast a run is: tokens and FLOP/s, the share of the device's peak (MFU), memory, and the time that is left.

The meter is fed with what was measured (tokens, FLOPs, seconds) and keeps no clock; peaks are the makers' figures.
"""

from __future__ import annotations

import re
from collections import deque
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

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


def peak_flops(device_name: str, dtype: str) -> float | None:
    """Dense peak FLOP/s of one device, None where it is not known (CPUs, other devices, other precisions)."""
    column = {"bfloat16": 1, "float16": 1, "float32": 2}.get(dtype)
    for row in PEAK_FLOPS:
        if column and re.search(rf"\b{re.escape(row[0])}\b", device_name, re.IGNORECASE):
            return float(row[column])
    return None


def device_peak_flops(device: torch.device, dtype: str) -> float | None:
    """`peak_flops` of the device at hand."""
    if device.type != "cuda":
        return None
    import torch

    return peak_flops(torch.cuda.get_device_name(device), dtype)


def faster_in_half(device_name: str, dtype: str) -> str:
    """What a device gains by training in bfloat16, in words; empty where that is nothing, or is not known."""
    now, half = (peak_flops(device_name, own) for own in (dtype, "bfloat16"))
    if dtype != "float32" or now is None or half is None or half <= now:
        return ""
    return f"; --dtype bfloat16, with float32 master weights, has {half / now:.0f}× the peak rate on this device"


def peak_memory(device: torch.device) -> int:
    """Most bytes this process has held so far: allocated on the GPU, or resident in main memory."""
    if device.type == "cuda":
        import torch

        return torch.cuda.max_memory_allocated(device)
    return _peak_resident()


def _peak_resident() -> int:
    # getrusage remembers a larger parent across exec; VmHWM is this program's own, but Linux only.
    status = Path("/proc/self/status")
    if status.exists() and (match := re.search(r"^VmHWM:\s+(\d+) kB", status.read_text(), re.MULTILINE)):
        return int(match[1]) * 1024
    import resource
    import sys

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


class Meter:
    """Turns measured steps into rates. `peak` is the FLOP/s of all devices together, None where it is not known."""

    def __init__(self, *, total_steps: int, peak: float | None = None, window: int = 20) -> None:
        assert window > 0 and total_steps >= 0
        self.total_steps = total_steps
        self.peak = peak
        self.tokens = 0
        self.flops = 0.0
        self.seconds = 0.0
        self._recent: deque[tuple[int, float, float]] = deque(maxlen=window)

    def step(self, step: int, *, tokens: int, flops: float, seconds: float, memory_bytes: int) -> dict[str, Any]:
        """Count one step and return the rates of its record; rates are medians over the last `window` steps."""
        assert seconds > 0
        self.tokens += tokens
        self.flops += flops
        self.seconds += seconds
        self._recent.append((tokens, flops, seconds))
        speed = median(f / s for _, f, s in self._recent)
        return {
            "tokens": tokens,
            "step_seconds": seconds,
            "tokens_per_second": median(t / s for t, _, s in self._recent),
            "flops_per_second": speed,
            "mfu": speed / self.peak if self.peak else None,
            "memory_bytes": memory_bytes,
            "eta_seconds": median(s for _, _, s in self._recent) * max(0, self.total_steps - step),
        }

    def summary(self) -> dict[str, Any]:
        """Totals and rates over all steps counted, the slow first ones included; and what the last `window` took."""
        speed = self.flops / self.seconds if self.seconds else 0.0
        return {
            "tokens": self.tokens,
            "seconds": self.seconds,
            "step_seconds": median(s for _, _, s in self._recent) if self._recent else None,
            "tokens_per_second": self.tokens / self.seconds if self.seconds else 0.0,
            "flops_per_second": speed,
            "mfu": speed / self.peak if self.peak else None,
        }
