"""Tensors between a device and the memory of its host: state, gradients and updated parameters.

State lies in ordinary memory of the host and passes through pinned buffers, of which there are a few; gradients come
into pinned memory. Buffers are used again and again, so that pinning is paid for once. Where the device is a CPU, these
are plain copies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from threading import Lock

import torch
from torch import Tensor


class HostBuffers:
    """Memory of the host, pinned for a GPU, to be taken and given back."""

    def __init__(self, pinned: bool) -> None:
        self._pinned, self._lock = pinned, Lock()  # the thread that updates takes some, too
        self._free: dict[int, list[Tensor]] = {}
        self._lent: list[tuple[torch.cuda.Event, list[Tensor]]] = []

    def take(self, size: int) -> Tensor:
        with self._lock:
            while self._lent and self._lent[0][0].query():
                self._put(self._lent.pop(0)[1])
            free = self._free.get(size)
            if free:
                return free.pop()
        return torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned)

    def like(self, tensor: Tensor, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
        """A buffer, and a tensor in it that looks like this one."""
        dtype = dtype or tensor.dtype
        buffer = self.take(tensor.numel() * dtype.itemsize)
        return buffer, buffer.view(dtype).view(tensor.shape)

    def give(self, buffers: list[Tensor], after: torch.cuda.Event | None = None) -> None:
        """after: when the device has passed it, they may be used again."""
        with self._lock:
            if after is None:
                self._put(buffers)
            else:
                self._lent.append((after, buffers))

    def _put(self, buffers: list[Tensor]) -> None:
        for buffer in buffers:
            self._free.setdefault(buffer.numel(), []).append(buffer)


class Copying:
    """Copies on their way. ended: what remains to be done on the host once the device has done its part."""

    def __init__(self, event: torch.cuda.Event | None = None, ended: Callable[[], None] | None = None) -> None:
        self._event, self._ended = event, ended

    def wait(self, what: str = "") -> None:
        """On the current stream; or on the host, where something remains to be done there."""
        if self._ended is not None:
            self.wait_here()
        elif self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)

    def wait_here(self) -> None:
        """On the host."""
        if self._event is not None:
            self._event.synchronize()
        if self._ended is not None:
            ended, self._ended = self._ended, None
            ended()


class HostMemory:
    """Of one device."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._on_gpu = device, device.type == "cuda"
        self._pool = HostBuffers(pinned=self._on_gpu)
        self._out = torch.cuda.Stream(device) if self._on_gpu else None
        self._back = torch.cuda.Stream(device) if self._on_gpu else None
        self._homes: dict[int, Tensor] = {}  # of what is on the device for a while, by who it is

    def is_at_home(self, tensor: Tensor) -> bool:
        return id(tensor) not in self._homes

    def mark(self) -> torch.cuda.Event | None:
        """The place of the current stream, for others to wait for."""
        return event_on(torch.cuda.current_stream(self._device)) if self._on_gpu else None

    def fetch(self, tensors: Sequence[Tensor]) -> Copying:
        """Starts to bring tensors to new memory of the device, where they are then; `store` brings them back."""
        staged: list[Tensor] = []
        for tensor in tensors:
            here = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
            if self._back is None:
                here.copy_(tensor)
            else:
                buffer, stage = self._pool.like(tensor)
                stage.copy_(tensor)
                staged.append(buffer)
                self._send(self._back, here, stage)
            self._homes[id(tensor)] = tensor.data
            tensor.data = here
        return self._sent(staged)

    def store(self, tensors: Sequence[Tensor]) -> Copying:
        """Starts to bring tensors home; one that was made on the device gets a home."""
        arriving: list[tuple[Tensor, Tensor, Tensor]] = []
        for tensor in tensors:
            home = self._homes.pop(id(tensor), None)
            if home is None:
                home = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
            here, tensor.data = tensor.data, home
            if self._out is None:
                home.copy_(here)
            else:
                buffer, stage = self._pool.like(here)
                self._send(self._out, stage, here)
                here.record_stream(self._out)
                arriving.append((home, stage, buffer))

        def finish() -> None:
            for home, stage, buffer in arriving:
                home.copy_(stage)
                self._pool.give([buffer])

        return Copying(self._ended(self._out), finish) if arriving else Copying()

    def take_in(self, tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], Copying, Callable[[], None]]:
        """Starts to copy tensors to the host; what they are there, and how to give their memory back."""
        buffers: list[Tensor] = []
        found: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            buffer, found[name] = self._pool.like(tensor)
            buffers.append(buffer)
            if self._out is None:
                found[name].copy_(tensor)
            else:
                self._send(self._out, found[name], tensor)
        return found, Copying(self._ended(self._out)), lambda: self._pool.give(buffers)

    def bring(self, targets: Sequence[Tensor], sources: Sequence[Tensor], after: torch.cuda.Event | None) -> Copying:
        """Starts to copy tensors of the host into those of the device, rounded on the way, once the device has passed a
        place."""
        if self._back is None:
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source)
            return Copying()
        assert after is not None
        self._back.wait_event(after)
        staged: list[Tensor] = []
        for target, source in zip(targets, sources, strict=True):
            buffer, stage = self._pool.like(source, target.dtype)
            stage.copy_(source)
            staged.append(buffer)
            with torch.cuda.stream(self._back):
                target.copy_(stage, non_blocking=True)
        return self._sent(staged)

    def _sent(self, staged: list[Tensor]) -> Copying:
        event = self._ended(self._back)
        self._pool.give(staged, event)
        return Copying(event)

    def _send(self, stream: torch.cuda.Stream, target: Tensor, source: Tensor) -> None:
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)

    @staticmethod
    def _ended(stream: torch.cuda.Stream | None) -> torch.cuda.Event | None:
        return None if stream is None else event_on(stream)


def event_on(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """Passes when the stream has done what it was given so far."""
    event = torch.cuda.Event()
    event.record(stream)
    return event
