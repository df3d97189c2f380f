"""Safetensors files written tensor by tensor and read box by box.

The library's own writer needs every tensor of a file at once; this one needs one at a time, by leaving room for the
header. The files are ordinary safetensors. What the tensors mean is not known here.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from phalanx.state.disk_stream import ALIGNED, DiskStream
from phalanx.state.layout import Box

HEADER_BYTES = 256 * 1024
"""Room for about two thousand tensors in a file."""

_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


@dataclass(frozen=True)
class WrittenFile:
    """A finished file. Its checksum is over the bytes from `start` to the end, then those before `start`."""

    name: str
    keys: tuple[str, ...]
    size: int
    start: int
    sha256: str


def checksum(path: Path, start: int = 0) -> str:
    """SHA-256 over a file's bytes from `start` to the end, then those before: a header is written last."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        file.seek(start)
        while block := file.read(1 << 22):
            digest.update(block)
        file.seek(0)
        digest.update(file.read(start))
    return digest.hexdigest()


def header_room(shapes: dict[str, tuple[int, ...]]) -> int:
    """Enough header bytes for all these tensors in one file."""
    entries = {key: {"dtype": "F8_E4M3", "shape": shape, "data_offsets": [10**15] * 2} for key, shape in shapes.items()}
    return len(json.dumps(entries)) + 1024


_SPREAD_BYTES = 64 << 20  # a file has at least so much before another is written beside it
_WRITERS = 4
_CHUNK_BYTES = 1 << 20
_QUEUED_BYTES = 1 << 30  # tensors that wait to be written


class ShardWriter:
    """Writes tensors into `<prefix>-00000.safetensors`, `<prefix>-00001…`, each of about `shard_bytes`.

    Large ones go into several files at once, each written and its checksum computed by a thread of its own: neither
    alone keeps up with a disk. Which tensor goes into which file depends on sizes alone. A tensor may change once it
    was taken; without `copies` only after `close`.
    """

    def __init__(
        self,
        folder: Path,
        shard_bytes: int,
        *,
        prefix: str = "tensors",
        metadata: dict[str, str] | None = None,
        header_bytes: int = HEADER_BYTES,
        writers: int = _WRITERS,
        copies: bool = True,
    ) -> None:
        self._folder, self._shard_bytes, self._prefix = folder, shard_bytes, prefix
        self._metadata, self._copies = metadata or {}, copies
        self._header_bytes = -(-(8 + header_bytes) // ALIGNED) * ALIGNED - 8
        self._lanes = [_Lane() for _ in range(writers)]
        self._queued: deque[tuple[Future[None], int]] = deque()
        self._num_files = self._queued_bytes = 0

    def add(self, key: str, tensor: Tensor) -> str:
        """Takes one tensor to be written and returns the name of its file."""
        tensor = tensor.detach().to("cpu", copy=self._copies, memory_format=torch.contiguous_format)
        lane = self._lane()
        if lane.shard is not None and not lane.shard.has_room(key, tensor, self._shard_bytes):
            lane.finish()
        if lane.shard is None:
            lane.shard = self._open()
        lane.shard.take(key, tensor)
        self._queued.append((lane.run(lane.shard.write, tensor), tensor.nbytes))
        self._queued_bytes += tensor.nbytes
        while self._queued_bytes > _QUEUED_BYTES:
            written, size = self._queued.popleft()
            written.result()
            self._queued_bytes -= size
        return lane.shard.path.name

    def close(self) -> list[WrittenFile]:
        """Finishes the last files; every file is on the disk, not just in its cache, when this returns."""
        for lane in self._lanes:
            lane.finish()
        for written, _ in self._queued:
            written.result()
        found = [file.result() for lane in self._lanes for file in lane.files]
        return sorted(found, key=lambda file: file.name)

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        """Leaves no file open when writing failed; `close` is what finishes files."""
        for lane in self._lanes:
            lane.close()

    def _lane(self) -> _Lane:
        """That with the least to write; a further one only once those in use have enough."""
        used = [lane for lane in self._lanes if lane.num_bytes]
        least = min(used, key=lambda lane: lane.num_bytes, default=self._lanes[0])
        if least.num_bytes >= _SPREAD_BYTES and len(used) < len(self._lanes):
            return self._lanes[len(used)]
        return least

    def _open(self) -> _OpenShard:
        name = f"{self._prefix}-{self._num_files:05}.safetensors"
        self._num_files += 1
        return _OpenShard(self._folder / name, self._metadata, self._header_bytes)


class _Lane:
    """The files that one thread writes, one after the other."""

    def __init__(self) -> None:
        self.shard: _OpenShard | None = None
        self.files: list[Future[WrittenFile]] = []
        self.num_bytes = 0
        self._thread: ThreadPoolExecutor | None = None

    def run(self, write: Callable[[Tensor], None], tensor: Tensor) -> Future[None]:
        self.num_bytes += tensor.nbytes
        return self._executor().submit(write, tensor)

    def finish(self) -> None:
        if self.shard is not None:
            self.files.append(self._executor().submit(self.shard.finish))
        self.shard = None

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)
        if self.shard is not None:
            self.shard.stream.close()

    def _executor(self) -> ThreadPoolExecutor:
        self._thread = self._thread or ThreadPoolExecutor(1, thread_name_prefix="tensor-file")
        return self._thread


class _OpenShard:
    """A file being written: header room first, then the tensors; the header itself comes last."""

    def __init__(self, path: Path, metadata: dict[str, str], header_bytes: int) -> None:
        self.path = path
        self.stream = DiskStream(path, 8 + header_bytes)
        self._entries: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
        self._header_bytes = header_bytes
        self._entries_bytes = len(json.dumps(self._entries))
        self._data_bytes = 0
        self._digest = hashlib.sha256()

    def has_room(self, key: str, tensor: Tensor, shard_bytes: int) -> bool:
        fits_header = self._entries_bytes + len(json.dumps(self._entry(key, tensor))) + 2 <= self._header_bytes
        return fits_header and self._data_bytes + tensor.nbytes <= shard_bytes

    def take(self, key: str, tensor: Tensor) -> None:
        """Makes room for a tensor, which is to be written next."""
        assert key not in self._entries, f"{key} is written twice"
        entry = self._entry(key, tensor)
        self._entries |= entry
        self._entries_bytes += len(json.dumps(entry)) + 2
        self._data_bytes += tensor.nbytes

    def write(self, tensor: Tensor) -> None:
        data = tensor.reshape(-1).view(torch.uint8).numpy().data
        for begin in range(0, len(data), _CHUNK_BYTES):
            part = data[begin : begin + _CHUNK_BYTES]  # small enough to be in the processor's cache the second time
            self._digest.update(part)
            self.stream.write(part)

    def finish(self) -> WrittenFile:
        text = json.dumps(self._entries).encode()
        assert len(text) <= self._header_bytes, f"the header of {self.path} outgrew its room"
        header = struct.pack("<Q", self._header_bytes) + text.ljust(self._header_bytes)
        self._digest.update(header)
        self.stream.finish(header)
        start = len(header)
        keys = tuple(key for key in self._entries if key != "__metadata__")
        return WrittenFile(self.path.name, keys, start + self._data_bytes, start, self._digest.hexdigest())

    def _entry(self, key: str, tensor: Tensor) -> dict[str, Any]:
        span = [self._data_bytes, self._data_bytes + tensor.nbytes]
        return {key: {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": span}}


class TensorFile:
    """A safetensors file to read from. Raises what the library raises when it is damaged."""

    def __init__(self, path: Path) -> None:
        self._handle: Any = safe_open(str(path), framework="pt")
        keys: list[str] = list(self._handle.keys())
        self.shapes: dict[str, tuple[int, ...]] = {key: tuple(self._handle.get_slice(key).get_shape()) for key in keys}

    def read(self, key: str, box: Box | None = None) -> Tensor:
        """One box of a tensor (all of it without `box`), in memory of its own."""
        box = Box.whole(self.shapes[key]) if box is None else box
        # The library may hand out a window on the mapped file, which is not ours to keep.
        return self._window(key, box).clone(memory_format=torch.contiguous_format)

    def read_into(self, target: Tensor, key: str, box: Box) -> None:
        """One box of a tensor, copied once."""
        target.copy_(self._window(key, box))

    def _window(self, key: str, box: Box) -> Tensor:
        return self._handle.get_slice(key)[box.slices()] if box.shape else self._handle.get_tensor(key)


def sync_folder(folder: Path) -> None:
    """Makes renames and new files in a folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_files(folder: Path) -> None:
    """Makes all that is in a folder survive a power cut, whoever wrote it."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        elif path.is_dir():
            sync_folder(path)
    sync_folder(folder)
