"""Tensors that go into several files at once: all there, each file with its checksum, and failures are not lost."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from phalanx.state import tensor_files
from phalanx.state.tensor_files import ShardWriter, checksum

TENSORS = {f"t{i}": torch.arange(i * 10, i * 10 + 100, dtype=torch.float32) for i in range(12)}


def test_large_tensors_are_spread_over_writers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_files, "_SPREAD_BYTES", 800)
    monkeypatch.setattr(tensor_files, "_QUEUED_BYTES", 500)
    with ShardWriter(tmp_path, 1200, writers=3) as writer:
        names = {key: writer.add(key, tensor) for key, tensor in TENSORS.items()}
        files = writer.close()
    assert [file.name for file in files] == sorted({*names.values()}) and len(files) == 6
    for file in files:
        stored = load_file(tmp_path / file.name)
        assert stored.keys() == {key for key, name in names.items() if name == file.name}
        assert all(torch.equal(tensor, TENSORS[key]) for key, tensor in stored.items())
        assert checksum(tmp_path / file.name, file.start) == file.sha256
        assert (tmp_path / file.name).stat().st_size == file.size


def test_what_little_there_is_goes_into_one_file(tmp_path: Path) -> None:
    with ShardWriter(tmp_path, 1 << 20) as writer:
        assert len({writer.add(key, tensor) for key, tensor in TENSORS.items()}) == 1
        assert len(writer.close()) == 1


def test_a_thread_that_cannot_write_is_heard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tensor_files._OpenShard, "write", write)
    with pytest.raises(OSError, match="No space left"), ShardWriter(tmp_path, 1 << 20) as writer:
        writer.add("t", TENSORS["t0"])
        writer.close()
