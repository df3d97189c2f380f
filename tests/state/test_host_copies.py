"""Copies of state on the host: their memory is kept, and chunks pass through buffers unchanged."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from phalanx.state import checkpoint, host_copies
from phalanx.state.background import AsyncSaver
from phalanx.state.host_copies import HostCopies, Ring
from phalanx.state.layout import whole


def test_memory_is_kept_for_what_looks_alike_and_only_for_that() -> None:
    copies, one, other = HostCopies(), torch.arange(5.0), torch.arange(3)
    first, rest = copies.take([whole("a", one), whole("b", other)])
    assert rest is None
    second, _ = copies.take([whole("b", other.double()), whole("a", one + 1)])
    assert second[1][1].data_ptr() == first[0][1].data_ptr() and torch.equal(second[1][1], one + 1)
    assert second[0][1].dtype == torch.float64
    copies.take([])
    assert not copies._kept


def test_what_there_is_no_room_for_is_left_over() -> None:
    copies, pieces = HostCopies(), [whole(str(i), torch.full((4,), float(i))) for i in range(4)]
    held, rest = copies.take(pieces, room=40)
    assert [shard.name for shard, _ in held] == ["0", "1"]
    assert rest is not None and [shard.name for shard, _ in rest] == ["2", "3"]
    held, rest = copies.take(pieces, room=40)  # what is kept needs no room
    assert len(held) == 4 and rest is None


@pytest.mark.parametrize("size", [0, 1, 64, 1000])
def test_chunks_pass_through_a_ring_unchanged(size: int) -> None:
    ring, sources = Ring(pinned=False, chunk_bytes=64), [torch.randn(size), torch.randn(7, size)[:, ::2]]
    targets = [torch.empty(source.shape) for source in sources]
    for source, target in zip(sources, targets, strict=True):
        ring.copy(source, target)
    ring.settle()
    assert all(torch.equal(source, target) for source, target in zip(sources, targets, strict=True))


def test_a_chunk_that_cannot_be_copied_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(host_copies, "_empty_into", fail)
    ring = Ring(pinned=False, chunk_bytes=64)
    ring.copy(torch.ones(4), torch.empty(4))
    with pytest.raises(RuntimeError, match="the device is gone"):
        ring.settle()


def test_memory_made_ahead_is_what_the_first_save_copies_into(tmp_path: Path) -> None:
    saver, values = AsyncSaver(tmp_path, keep=1), torch.ones(1000)
    saver.prepare([("w", values)])
    saver.wait()
    made = saver._copies._kept["w"].data_ptr()
    saver.save(1, [("w", values)], {})
    values.zero_()
    path = saver.wait()
    assert path is not None and (checkpoint.open(path).read("w") == 1).all()
    assert saver._copies._kept["w"].data_ptr() == made
    assert saver.facts.copied_bytes == 4000 and saver.facts.write_seconds is not None


def test_nothing_is_made_ahead_where_there_is_no_room(tmp_path: Path) -> None:
    saver = AsyncSaver(tmp_path, keep=1, room=lambda: 10)
    saver.prepare([("w", torch.ones(1000))])
    saver.wait()
    assert not saver._copies._kept
