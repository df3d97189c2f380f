"""A torch.profiler window over chosen steps, written as a Chrome trace (open it in Perfetto or chrome://tracing)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.written import parse_steps

if TYPE_CHECKING:
    from torch.profiler import profile


class StepProfiler:
    """Wrap every step in `with profiler.step(n):`; steps A to B of "A:B" are traced, all others cost nothing.

    `path` is the trace once it has been written. A run that ends inside the window is written by `close`.
    """

    def __init__(self, profile_steps: str | None, folder: str | os.PathLike[str]) -> None:
        self.window = parse_steps(profile_steps) if profile_steps else None
        self.folder = Path(folder)
        self.path: Path | None = None
        self._profile: profile | None = None
        self._traced: list[int] = []

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        if self.window is None or not self.window[0] <= step <= self.window[1]:
            yield
            return
        from torch.profiler import record_function

        if self._profile is None:
            self._profile = _start()
        self._traced.append(step)
        with record_function(f"step {step}"):
            yield
        if step == self.window[1]:
            self.close()

    def close(self) -> None:
        """Write what was traced so far, if anything is still open."""
        if self._profile is None:
            return
        self._profile.stop()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.path = self.folder / f"trace-steps-{self._traced[0]}-{self._traced[-1]}.json"
        self._profile.export_chrome_trace(str(self.path))
        self._profile = None


def _start() -> profile:
    import torch
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    profiler = profile(activities=activities, record_shapes=True)
    profiler.start()
    return profiler
