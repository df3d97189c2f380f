"""A snapshot of the CUDA allocator over one step, every allocation with its stack; https://pytorch.org/memory_viz shows
it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from phalanx.errors import ConfigError

_MOST_EVENTS = 200_000


def require_cuda(step: int | None, device_type: str) -> None:
    if step is not None and device_type != "cuda":
        raise ConfigError(
            f"option memory_snapshot = {step}: there is none of {device_type}, only of CUDA's allocator",
            "leave it out; the header of a run says what a rank will hold, and of what",
        )


@contextmanager
def memory_snapshot(step: int, wanted: int | None, path: Path) -> Iterator[None]:
    """Around step `step`; of the one that is `wanted` the snapshot is written, even if memory ran out in it."""
    if step != wanted:
        yield
        return
    memory = _allocator()
    memory._record_memory_history(max_entries=_MOST_EVENTS)
    try:
        yield
    finally:
        memory._dump_snapshot(str(path))
        memory._record_memory_history(enabled=None)


def _allocator() -> Any:
    import torch

    return torch.cuda.memory
