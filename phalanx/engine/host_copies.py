"""Values between the memory of the device and that of the host, bit for bit, on streams of their own.

On the host a value lies in pinned buffers that are used again and again, so that pinning is paid for once. Memory is
copied as it is: tensors that share some share it again when they are back. Where the device is a CPU, these are plain
copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.engine.redistribute import Arriving
from phalanx.params.host_memory import HostBuffers, copy_on

Held = Tensor | Sequence[Tensor]


@dataclass(frozen=True)
class _Look:
    """A tensor without its contents; which of the buffers holds these."""

    buffer: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def on(self, storage: torch.UntypedStorage) -> Tensor:
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, self.offset, self.size, self.stride)


class HostValue:
    """A value on the host. single: it is a tensor, not several."""

    def __init__(self, pool: HostBuffers, buffers: list[Tensor], looks: list[_Look], single: bool) -> None:
        self._pool, self.buffers, self.looks, self.single = pool, buffers, looks, single

    @property
    def num_bytes(self) -> int:
        return sum(buffer.numel() for buffer in self.buffers)

    def release(self) -> None:
        """Its memory may be used again."""
        self._pool.give(self.buffers)
        self.buffers = []


class HostCopies:
    """Copies of one device. Whoever waits for one waits on its stream, not on the host."""

    def __init__(self, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._device, self._pool = device, HostBuffers(pinned=on_gpu)
        self._out = torch.cuda.Stream(device) if on_gpu else None
        self._back = torch.cuda.Stream(device) if on_gpu else None

    def out(self, value: Held) -> Arriving:
        """Starts a copy to the host. The device's memory must stay until it has arrived."""
        tensors = [value] if isinstance(value, Tensor) else list(value)
        storages: dict[int, tuple[int, Tensor]] = {}  # by where they lie: their number, and their bytes
        looks: list[_Look] = []
        for tensor in tensors:
            assert tensor.device.type == self._device.type, f"a value on {tensor.device}, not on {self._device}"
            storage = tensor.untyped_storage()
            number, _ = storages.setdefault(storage.data_ptr(), (len(storages), _bytes_of(storage)))
            looks.append(_Look(number, tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset())))
        sources = [content for _, content in storages.values()]
        held = HostValue(self._pool, [self._pool.take(s.numel()) for s in sources], looks, isinstance(value, Tensor))
        return Arriving(copy_on(self._out, held.buffers, sources), lambda: held)

    def back(self, held: HostValue) -> Arriving:
        """Starts a copy to new memory of the device. The host's memory must stay until it has arrived."""
        targets = [torch.empty(b.numel(), dtype=torch.uint8, device=self._device) for b in held.buffers]
        tensors = [look.on(targets[look.buffer].untyped_storage()) for look in held.looks]
        return Arriving(copy_on(self._back, targets, held.buffers), lambda: tensors[0] if held.single else tensors)


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (storage.nbytes(),), (1,))
