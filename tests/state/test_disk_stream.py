"""Files that are written past the cache of the system: the same bytes, whatever the file system allows."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from phalanx.state import disk_stream
from phalanx.state.disk_stream import ALIGNED, DiskStream


def written(path: Path, sizes: list[int]) -> tuple[bytes, bytes]:
    parts = [os.urandom(size) for size in sizes]
    head = os.urandom(ALIGNED)
    stream = DiskStream(path, ALIGNED)
    for part in parts:
        stream.write(memoryview(part))
    stream.finish(head)
    return path.read_bytes(), head + b"".join(parts)


@pytest.mark.parametrize("sizes", [[], [1], [8192], [5, 8187], [8191, 8193, 1], [40_000, 3, 12_345]])
def test_a_file_holds_what_was_written(tmp_path: Path, sizes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_stream, "_BUFFER_BYTES", 8192)
    found, expected = written(tmp_path / "file", sizes)
    assert found == expected


@pytest.mark.parametrize("refusal", ["when asked", "when written"])
def test_a_file_system_that_knows_only_its_cache_is_written_through_it(
    tmp_path: Path, refusal: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_stream, "_BUFFER_BYTES", 8192)
    refused, write = list[str](), os.pwrite

    def fcntl(file: int, command: int, flags: int = 0) -> int:
        if refusal == "when asked" and flags & os.O_DIRECT:
            refused.append("asked")
            raise OSError(errno.EINVAL, "Invalid argument")
        return flags

    def pwrite(file: int, data: memoryview, place: int) -> int:
        if refusal == "when written" and not refused:
            refused.append("written")
            raise OSError(errno.EINVAL, "Invalid argument")
        return write(file, data, place)

    monkeypatch.setattr(disk_stream.fcntl, "fcntl", fcntl)
    monkeypatch.setattr(disk_stream.os, "pwrite", pwrite)
    found, expected = written(tmp_path / "file", [20_000])
    assert found == expected and refused


def test_a_full_disk_is_heard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    stream = DiskStream(tmp_path / "file", ALIGNED)
    monkeypatch.setattr(disk_stream.os, "pwrite", full)
    stream.write(memoryview(b"abc"))
    with pytest.raises(OSError, match="No space left"):
        stream.finish(bytes(ALIGNED))
    stream.close()  # was closed already
