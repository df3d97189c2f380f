"""Tensors between a device and the memory of its host: state, gradients and updated parameters.

What a GPU copies from or to lies in pinned memory, so that copies run beside computation at the speed of the link.
Where the device is a CPU, these are plain copies.
"""

from __future__ import annotations

import ctypes
import mmap
import weakref
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from threading import Lock
from typing import Any, Protocol

import torch
from torch import Tensor


class Release(Protocol):
    """Gives memory of the host back. after: once the device has passed it."""

    def __call__(self, after: torch.cuda.Event | None = None) -> None: ...


def pinned(size: int) -> Tensor:
    """So many bytes. All threads touch the pages before they are registered: that is six times faster than to have
    them made one by one while they are pinned."""
    memory = mmap.mmap(-1, max(size, 1))
    owner = (ctypes.c_ubyte * len(memory)).from_buffer(memory)
    own = torch.frombuffer(owner, dtype=torch.uint8)  # keeps the owner
    own.zero_()
    runtime: Any = torch.cuda.cudart()
    torch.cuda.check_error(int(runtime.cudaHostRegister(own.data_ptr(), own.numel(), 0)))
    weakref.finalize(owner, runtime.cudaHostUnregister, own.data_ptr()).atexit = False
    return own[:size]


def on_host(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy on the host of `device`."""
    return home_of(tensor, device).copy_(tensor)


def home_of(tensor: Tensor, device: torch.device) -> Tensor:
    """Memory for it there, pinned for a GPU."""
    return _empty(tensor.numel() * tensor.itemsize, device.type == "cuda").view(tensor.dtype).view(tensor.shape)


def _empty(size: int, is_pinned: bool) -> Tensor:
    return pinned(size) if is_pinned else torch.empty(size, dtype=torch.uint8)


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
        return _empty(size, self._pinned)

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
    """Copies on their way."""

    def __init__(self, event: torch.cuda.Event | None = None) -> None:
        self.event = event

    @property
    def is_done(self) -> bool:
        return self.event is None or self.event.query()

    def wait(self, what: str = "") -> None:
        """On the current stream."""
        if self.event is not None:
            torch.cuda.current_stream().wait_event(self.event)

    def wait_here(self) -> None:
        """On the host."""
        if self.event is not None:
            self.event.synchronize()


class HostMemory:
    """Of one device."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._on_gpu = device, device.type == "cuda"
        self._pool = HostBuffers(pinned=self._on_gpu)
        self._out = torch.cuda.Stream(device) if self._on_gpu else None
        self._back = torch.cuda.Stream(device) if self._on_gpu else None
        self._homes: dict[int, Tensor] = {}  # of what is on the device for a while, by who it is
        self._stored: dict[int, torch.cuda.Event] = {}  # when what is on its way home is there

    def is_at_home(self, tensor: Tensor) -> bool:
        return id(tensor) not in self._homes

    def mark(self) -> torch.cuda.Event | None:
        """The place of the current stream, for others to wait for."""
        return event_on(torch.cuda.current_stream(self._device)) if self._on_gpu else None

    def fetch(self, tensors: Sequence[Tensor]) -> Copying:
        """Starts to bring tensors to new memory of the device, where they are then; `store` brings them back."""
        homes = [tensor.data for tensor in tensors]
        for tensor, home in zip(tensors, homes, strict=True):
            if self._back is not None and id(tensor) in self._stored:
                self._back.wait_event(self._stored.pop(id(tensor)))
            self._homes[id(tensor)] = home
            tensor.data = torch.empty(home.shape, dtype=home.dtype, device=self._device)
        return copy_on(self._back, [tensor.data for tensor in tensors], homes)

    def bring_in(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Starts to copy tensors to the device; what is fetched next arrives after them."""
        here = {name: torch.empty(own.shape, dtype=own.dtype, device=self._device) for name, own in tensors.items()}
        copy_on(self._back, list(here.values()), list(tensors.values()))
        return here

    def store(self, tensors: Sequence[Tensor], others: Sequence[tuple[Tensor, Tensor]] = ()) -> Copying:
        """Starts to bring tensors home; one that was made on the device gets a home. others: targets on the host, and
        what goes there with them."""
        here = [tensor.data for tensor in tensors]
        for tensor in tensors:
            home = self._homes.pop(id(tensor), None)
            tensor.data = home_of(tensor, self._device) if home is None else home
        if self._out is not None:
            for own in (*here, *(source for _, source in others)):
                own.record_stream(self._out)
        targets = [*(tensor.data for tensor in tensors), *(target for target, _ in others)]
        copying = copy_on(self._out, targets, [*here, *(source for _, source in others)])
        if copying.event is not None:
            self._stored |= dict.fromkeys(map(id, tensors), copying.event)
        return copying

    def on_the_way_in(self) -> AbstractContextManager[Any]:
        """While it is open, what is fetched waits for nothing but what was fetched before."""
        return nullcontext() if self._back is None else torch.cuda.stream(self._back)

    def arrived(self) -> torch.cuda.Event | None:
        """Passes when all that was fetched so far is on the device."""
        return None if self._back is None else event_on(self._back)

    def settle(self) -> None:
        """Waits until all that was brought home is there, for whoever reads it on the host."""
        if self._out is not None:
            self._out.synchronize()

    def take_in(self, tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], Copying, Release]:
        """Starts to copy tensors to the host; what they are there, and how to give their memory back."""
        taken = {name: self._pool.like(tensor) for name, tensor in tensors.items()}
        found = {name: there for name, (_, there) in taken.items()}
        copying = copy_on(self._out, list(found.values()), list(tensors.values()))
        return found, copying, lambda after=None: self._pool.give([buffer for buffer, _ in taken.values()], after)

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
        event = event_on(self._back)
        self._pool.give(staged, event)
        return Copying(event)


def copy_on(stream: torch.cuda.Stream | None, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> Copying:
    """After everything that the current stream has been given so far, and beside what it is given next."""
    if stream is None:
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)
        return Copying()
    stream.wait_stream(torch.cuda.current_stream(stream.device))
    with torch.cuda.stream(stream):
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source, non_blocking=True)
    return Copying(event_on(stream))


def event_on(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """Passes when the stream has done what it was given so far."""
    event = torch.cuda.Event()
    event.record(stream)
    return event
