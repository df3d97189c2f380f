"""Copies of state in the memory of the host, from which a checkpoint is written while training goes on.

The memory is kept from one checkpoint to the next: to copy into pages that exist is ten times faster than into new
ones. From a GPU tensors come in chunks through a few pinned buffers, at the speed of its link; to pin memory for all
of them would take longer than to write them.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from phalanx.state.layout import StateShard

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_CHUNK_BYTES = 32 << 20
_NUM_BUFFERS = 8

Pieces = Iterable[tuple[StateShard, "Tensor"]]
Held = list[tuple[StateShard, "Tensor"]]


class HostCopies:
    """Of one rank, one set at a time: a new one is taken when the last is not needed any more."""

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}
        self._ring: Ring | None = None

    def take(self, pieces: Pieces, room: int | None = None) -> tuple[Held, Pieces | None]:
        """Copies, complete when this returns, and what there was no room for. room: bytes of memory that may be added
        to what is kept."""
        held, rest = list[tuple[StateShard, "Tensor"]](), iter(pieces)
        kept, self._kept = self._kept, {}
        try:
            for shard, data in rest:
                own = kept.pop(shard.name, None)
                if not _fits(data, own):
                    own = None  # let go of before there is another
                    if room is not None and (room := room - data.nbytes) < 0:
                        return held, itertools.chain([(shard, data)], rest)
                target = self._kept[shard.name] = memory_like(data) if own is None else own
                self._copy(data.detach(), target)
                held.append((shard, target))
            return held, None
        finally:
            if self._ring is not None:
                self._ring.settle()

    def prepare(self, memory: Iterable[tuple[str, Tensor]], on_gpu: bool) -> None:
        """Makes the memory that a copy will need, so that to take it need not wait for the system. memory: by name,
        not touched yet."""
        for name, own in memory:
            ctypes.memset(own.data_ptr(), 0, own.nbytes)  # without the interpreter's lock
            self._kept.setdefault(name, own)
        if on_gpu:
            self._ring = self._ring or Ring(pinned=True)

    def _copy(self, source: Tensor, target: Tensor) -> None:
        if source.is_cuda:
            self._ring = self._ring or Ring(pinned=True)
            self._ring.copy(source, target)
        else:
            target.copy_(source)


class Ring:
    """Buffers that chunks pass through, each emptied by a thread of its own. pinned: for a GPU."""

    def __init__(self, pinned: bool, chunk_bytes: int = _CHUNK_BYTES) -> None:
        import torch

        self._chunk_bytes = chunk_bytes
        self._buffers = [torch.empty(chunk_bytes, dtype=torch.uint8, pin_memory=pinned) for _ in range(_NUM_BUFFERS)]
        self._emptied: list[Future[None] | None] = [None] * _NUM_BUFFERS
        self._next = 0
        self._threads = ThreadPoolExecutor(_NUM_BUFFERS, thread_name_prefix="host-copy")

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Starts it; after `settle` it is there, and until then nobody may change the source."""
        there, here = _as_bytes(source.contiguous()), _as_bytes(target)
        for begin in range(0, len(there), self._chunk_bytes):
            chunk = there[begin : begin + self._chunk_bytes]
            at, self._next = self._next, (self._next + 1) % _NUM_BUFFERS
            self._await(at)
            buffer = self._buffers[at][: len(chunk)].copy_(chunk, non_blocking=True)
            arrived = _mark(source)
            self._emptied[at] = self._threads.submit(_empty_into, here[begin : begin + len(chunk)], buffer, arrived)

    def settle(self) -> None:
        for at in range(_NUM_BUFFERS):
            self._await(at)

    def _await(self, at: int) -> None:
        emptied, self._emptied[at] = self._emptied[at], None
        if emptied is not None:
            emptied.result()


def _mark(source: Tensor) -> torch.cuda.Event | None:
    """Passes when a GPU has copied what it was told to."""
    import torch

    if not source.is_cuda:
        return None
    event = torch.cuda.Event(blocking=True)
    event.record(torch.cuda.current_stream(source.device))
    return event


def _empty_into(target: Tensor, buffer: Tensor, arrived: torch.cuda.Event | None) -> None:
    if arrived is not None:
        arrived.synchronize()
    # Without the interpreter's lock, and without the threads that tensors are computed with: those are training's.
    ctypes.memmove(target.data_ptr(), buffer.data_ptr(), len(buffer))


def memory_like(tensor: Tensor) -> Tensor:
    """On the host; its pages are made when they are first touched."""
    import torch

    return torch.empty(tensor.shape, dtype=tensor.dtype)


def _fits(tensor: Tensor, kept: Any) -> bool:
    return kept is not None and kept.shape == tensor.shape and kept.dtype == tensor.dtype


def _as_bytes(tensor: Tensor) -> Tensor:
    import torch

    return tensor.reshape(-1).view(torch.uint8)
