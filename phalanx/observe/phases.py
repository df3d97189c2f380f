"""How long the parts of a run take, from the start of its process to its end: seconds by name, in their order."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from phalanx.observe.format import seconds_text


class Phases:
    """began: when the run was asked for, as `time.time()` says it; what passed since then is the first phase."""

    def __init__(self, began: float) -> None:
        self.seconds: dict[str, float] = {"start": max(0.0, time.time() - began)}
        self._inside: list[float] = []  # of every phase under way, what phases within it took

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Within another one its seconds are not the other's."""
        begin = time.perf_counter()
        self._inside.append(0.0)
        try:
            yield
        finally:
            passed = time.perf_counter() - begin
            self.seconds[name] = self.seconds.get(name, 0.0) + passed - self._inside.pop()
            if self._inside:
                self._inside[-1] += passed

    def since(self, name: str, begin: float) -> None:
        """What passed since `begin`, as `time.perf_counter()` says it, was another phase within this one."""
        passed = time.perf_counter() - begin
        self.seconds[name] = self.seconds.get(name, 0.0) + passed
        if self._inside:
            self._inside[-1] += passed

    def describe(self) -> str:
        """`start 4.1s, prepare 2.0s, first step 11.3s`; what took no time to speak of is left out."""
        return ", ".join(f"{name} {seconds_text(seconds)}" for name, seconds in self.seconds.items() if seconds > 0.05)


def process_began() -> float:
    """When this process was started, imports included, where the system says so; else now."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        uptime = float(Path("/proc/uptime").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return time.time()
    return time.time() - (uptime - ticks / os.sysconf("SC_CLK_TCK"))
