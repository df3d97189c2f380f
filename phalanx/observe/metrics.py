"""How fast a run is: tokens and FLOP/s, the share of the device's peak (MFU), memory, and the time that is left.

The meter is fed with what was measured (tokens, FLOPs, seconds) and keeps no clock; peaks are the makers' figures.
"""

from __future__ import annotations

import re
from collections import deque
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from phalanx.planning.precision import peak_flops

if TYPE_CHECKING:
    import torch


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
