"""A file written from its beginning to its end at the speed of the disk: past the cache of the system where the file is
large and its file system allows that, else through it.

The cache costs a copy and makes the disk idle until somebody asks for what is in it; and what is read back comes from
the disk only if it is not in the cache.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import mmap
import os
from pathlib import Path

import numpy as np

ALIGNED = 4096  # what disks ask of addresses, sizes and places in a file
_BUFFER_BYTES = 8 << 20
_DIRECT = getattr(os, "O_DIRECT", 0)  # a system may have no such thing


class DiskStream:
    """start: where the stream begins; what lies before it is written last, with `finish`."""

    def __init__(self, path: Path, start: int) -> None:
        assert start % ALIGNED == 0, f"a stream begins at a multiple of {ALIGNED}, not at {start}"
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666)
        self._memory = mmap.mmap(-1, _BUFFER_BYTES)  # begins at a page; pages that are not used are never made
        self._buffer = np.frombuffer(self._memory, np.uint8)
        self._filled, self._place = 0, start
        self._direct = False
        self._closed = False

    def write(self, data: memoryview) -> None:
        """Copies of what it is given are on their way to the disk when it returns, not necessarily there."""
        source = np.frombuffer(data, np.uint8)  # copied without the lock of the interpreter
        for taken in _parts(len(source), _BUFFER_BYTES - self._filled):
            part = source[taken]
            self._buffer[self._filled : self._filled + len(part)] = part
            self._filled += len(part)
            if self._filled == _BUFFER_BYTES:
                self._try_direct()
                self._flush(_BUFFER_BYTES)

    def finish(self, head: bytes) -> None:
        """Everything is on the disk, not just in its cache, when this returns."""
        try:
            self._set_direct(False)
            self._flush(self._filled)
            _write_all(self._file, memoryview(head), 0)
            os.fsync(self._file)
            with contextlib.suppress(OSError):  # whoever reads the file again reads the disk
                os.posix_fadvise(self._file, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            self.close()

    def close(self) -> None:
        if not self._closed:
            os.close(self._file)
        self._closed = True

    def _try_direct(self) -> None:
        if not self._direct and _DIRECT:
            self._direct = self._set_direct(True)

    def _set_direct(self, wanted: bool) -> bool:
        if not wanted and not self._direct:
            return True
        flags = fcntl.fcntl(self._file, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self._file, fcntl.F_SETFL, flags | _DIRECT if wanted else flags & ~_DIRECT)
        except OSError:  # the file system knows only its cache
            return False
        return True

    def _flush(self, size: int) -> None:
        data = memoryview(self._memory)[:size]
        try:
            _write_all(self._file, data, self._place)
        except OSError as error:
            if not self._direct or error.errno != errno.EINVAL:
                raise
            self._set_direct(False)  # it said it would, and does not
            _write_all(self._file, data, self._place)
        finally:
            data.release()
        self._place, self._filled = self._place + size, 0


def _parts(size: int, first: int) -> list[slice]:
    """So many bytes as parts that fill a buffer: first what it has room for."""
    ends = [0, *range(min(first, size), size, _BUFFER_BYTES), size]
    return [slice(begin, end) for begin, end in itertools.pairwise(ends) if end > begin]


def _write_all(file: int, data: memoryview, place: int) -> None:
    while data:
        written = os.pwrite(file, data, place)
        data, place = data[written:], place + written
